"""What ``python -m signalfire`` runs."""
