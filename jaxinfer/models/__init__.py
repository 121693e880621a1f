"""One file per Hugging Face `model_type`, found by name."""
