"""Base of the engines: sessions, CPU streams, memory metering, collectives, tied weights. Imports torch."""
