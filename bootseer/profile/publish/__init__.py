"""Publishing of a start's timeline: to the store, to an OpenTelemetry collector, and as metrics."""
