"""Settings of vLLM on a CPU, for a rank's own engine and for servers.

The block is the smallest of vLLM's attention, because only complete blocks are cached. The cache is small, because vLLM
allocates all of it at once and would otherwise take a share of all memory.
"""

CPU_BLOCK = 32  # tokens
CPU_KV_CACHE_BYTES = 256 << 20
CPU_STEP_TOKENS = 4096
