"""What the device does: model, prompt tokens, prefill, shared-prefix decode, KV codecs.

This file imports nothing: transformers looks for a package of this name, and must get no side effect from ours.
"""
