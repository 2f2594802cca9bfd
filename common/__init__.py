"""What every role shares: transport, identity, settings, journal, blobs, telemetry, the worker runtime."""
