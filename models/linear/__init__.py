"""Linear layers: weight formats and their matmuls. A new format is one more file here.

- `protocol`: the interfaces of linear layers and weight formats
- `packed`: matrices of a CPU in tiles of 16 rows, shared by the CPU's formats
- `tiles`: dense tiles of 16 rows, multiplied by the native kernels: on a CPU
- `quantised`: packed blocks of 4 to 8 bits from GGUF files, multiplied by the native kernels
- `quantised_gpu`: the same on a GPU; `grouped` defines its layout
- `offloaded`: some rows on a device, the others in host memory: streamed, or computed by the CPU
- `unpack`: dequantises a CPU's tiles on a device
- `dense`: the default format: the model's dtype, in rows for torch or in `tiles`
"""
