"""batchrun: runs a JSONL file of LLM requests to the end."""

__version__ = "0.1.0"
