"""A fleet as one document for people without cloud credentials: its form, where it is read and written."""
