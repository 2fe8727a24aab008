"""The native code of the CPU backends: one library of several sources, compiled at first use."""
