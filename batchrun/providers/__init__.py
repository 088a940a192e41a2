"""Providers: codecs between batches and each provider's wire format; no I/O."""
