"""What a layer keeps of its keys and values: one policy for each group of KV heads, served by Headwise's attention.

layer.py is the cache layer that transformers sees; base.py says what a policy is; a file a policy beside them.
"""
