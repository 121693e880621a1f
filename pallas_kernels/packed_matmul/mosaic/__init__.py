"""The packed product on Hopper: W4A16 and W8A16 by wgmma, codes unpacked in registers."""

from pallas_kernels.packed_matmul.mosaic.call import packed_matmul
from pallas_kernels.packed_matmul.mosaic.config import CANDIDATES, Config, Problem, pick_config

__all__ = ["CANDIDATES", "Config", "Problem", "packed_matmul", "pick_config"]
