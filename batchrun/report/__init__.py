"""Report: a pure fold over the store's records."""
