"""Intake: bytes become rows."""
