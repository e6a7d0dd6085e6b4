"""After a start: its timeline in the store, at a collector of OpenTelemetry, and as figures."""
