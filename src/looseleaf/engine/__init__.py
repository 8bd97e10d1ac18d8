"""Scheduling, batching, text and streams over a `CacheManager` and a `ModelRunner`. Torch-free. See `README.md`."""
