"""Hugging Face models on paged memory: unmodified transformers models whose keys and values live in blocks
(torch).
"""
