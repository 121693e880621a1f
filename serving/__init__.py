"""The HTTP server: OpenAI's routes over aiohttp, in front of an engine that it reaches through EngineClient only."""
