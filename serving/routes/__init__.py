"""One decorated function per endpoint; `ALL` is what the application serves."""

from serving.routes import chat_completions, completions, debug_kv, health, metrics, models, page, tokenize

ALL = (chat_completions, completions, models, tokenize, health, metrics, page, debug_kv)
DEBUG = (debug_kv,)
"""Those of them that need --debug-routes on."""
