"""Room for the CUDA graphs of a training run, set before MLX first computes; imported for that alone.

On CUDA, MLX turns what it launches into graphs and keeps 400 of them, one for each order of operations; instantiating
one again costs milliseconds, and after 800 that were not found, over the life of the process, MLX raises an error. One
update of 28 layers has hundreds, and others with every new way to cut a batch. Variables that are set stay as they are;
without CUDA they say nothing.
"""

import os

os.environ.setdefault("MLX_CUDA_GRAPH_CACHE_SIZE", "2000")
os.environ.setdefault("MLX_ENABLE_CACHE_THRASHING_CHECK", "0")
