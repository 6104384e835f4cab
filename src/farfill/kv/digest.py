"""Digests of a model folder's files: weights, tokenizer, chat template.

Not here: what is done with them (`fingerprint`).
"""
