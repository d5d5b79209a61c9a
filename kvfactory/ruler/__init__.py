"""RULER: thirteen synthetic tasks whose prompts grow to any length, made here or read from existing files.

Structure, parameters and metrics follow NVIDIA/RULER (Hsieh et al., 2024, arXiv:2404.06654); all texts are our own.
"""
