"""Drop-ins for existing callers."""
