"""Planning on real traffic: traces replayed through the very `CacheManager` that serves."""
