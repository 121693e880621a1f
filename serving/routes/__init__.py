"""One decorated function per endpoint; `ALL` is what the application serves."""

from serving.routes import chat_completions, completions, health, metrics, models, page, tokenize

ALL = (chat_completions, completions, models, tokenize, health, metrics, page)
