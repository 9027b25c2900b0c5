"""The handlers that come with Signalfire: one feature, one file."""
