"""What is measured, one module a bench. Each says its layer, load and hardware, and prints, last, one JSON line."""
