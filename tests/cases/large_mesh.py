"""A device mesh whose shape comes from the command line."""

import sys

from torch.distributed.device_mesh import init_device_mesh

mesh = init_device_mesh("cuda", tuple(map(int, sys.argv[1:])), mesh_dim_names=("dp", "tp"))
