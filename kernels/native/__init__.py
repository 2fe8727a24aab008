"""The native code of the CPU backends: one shared library of several sources, compiled at first use."""
