"""Tables of GPUs, which `hardware` reads, and where their numbers come from.

* Per compute capability: the table of technical specifications in the CUDA C++
  Programming Guide, and the table of arithmetic throughput there for the fp32
  lanes.
* Per product: NVIDIA's datasheets and architecture whitepapers, each named
  above its rows. Tensor-core rates are *dense*: where a datasheet prints rates
  with sparsity, half of them. The clock is the boost clock of the fp32 rate;
  tensor-core rates of data-centre GPUs from Hopper on are of lower ones (H100:
  1830 MHz).

Not checked against a datasheet: the SMs of a GB300 and some sizes of L2. Worked
out from others: rates of the RTX 3060 and the GB10, the clock of a GB300.
"""

# Of each compute capability: float32 lanes and KiB of shared memory of an SM,
# and most threads and thread blocks that are resident on it.
ARCHITECTURES = {
  (7, 5): (64, 64, 1024, 16),
  (8, 0): (64, 164, 2048, 32),
  (8, 6): (128, 100, 1536, 16),
  (8, 7): (128, 164, 1536, 16),
  (8, 9): (128, 100, 1536, 24),
  (9, 0): (128, 228, 2048, 32),
  (10, 0): (128, 228, 2048, 32),
  (10, 3): (128, 228, 2048, 32),
  (12, 0): (128, 100, 1536, 24),
  (12, 1): (128, 100, 1536, 24),
}

# L2 of GH100 products: 10 MiB come with each memory stack that is enabled, so
# five stacks (H100 80 GB) have 50 MiB and six (H200, GH200, H100 NVL) 60.
# On GeForce the tensor cores run at half rate when they accumulate in float32.
# Turing has neither bfloat16 nor TF32: float32's rate stands for both.
# capability, SMs, MHz, L2 MiB, DRAM GB/s, dense TFLOP/s in fp32, TF32, bf16.
# fmt: off
PRODUCTS = {
    # NVIDIA H200 Tensor Core GPU datasheet.
    "NVIDIA H200": ((9, 0), 132, 1980, 60, 4800, 67, 494.5, 989.5),
    "NVIDIA H200 NVL": ((9, 0), 132, 1785, 60, 4800, 60, 417.5, 835.5),
    # NVIDIA H100 Tensor Core GPU datasheet and architecture whitepaper.
    "NVIDIA H100 80GB HBM3": ((9, 0), 132, 1980, 50, 3350, 67, 494.5, 989.5),
    "NVIDIA H100 PCIe": ((9, 0), 114, 1755, 50, 2000, 51.2, 378, 756),
    "NVIDIA H100 NVL": ((9, 0), 132, 1785, 60, 3900, 60, 417.5, 835.5),
    # NVIDIA GH200 Grace Hopper Superchip datasheet (96 GB of HBM3).
    "NVIDIA GH200 480GB": ((9, 0), 132, 1980, 60, 4000, 67, 494, 990),
    # NVIDIA HGX datasheet (an eighth of HGX B200); L2: Blackwell tuning guide.
    "NVIDIA B200": ((10, 0), 148, 1965, 126, 8000, 75, 1125, 2250),
    # NVIDIA GB300 NVL72 datasheet (a 72nd); the clock from its float32 rate.
    "NVIDIA GB300": ((10, 3), 152, 2055, 126, 8000, 80, 1250, 2500),
    # NVIDIA A100 Tensor Core GPU datasheet and architecture whitepaper.
    "NVIDIA A100-SXM4-40GB": ((8, 0), 108, 1410, 40, 1555, 19.5, 156, 312),
    "NVIDIA A100-SXM4-80GB": ((8, 0), 108, 1410, 40, 2039, 19.5, 156, 312),
    "NVIDIA A100-PCIE-40GB": ((8, 0), 108, 1410, 40, 1555, 19.5, 156, 312),
    "NVIDIA A100 80GB PCIe": ((8, 0), 108, 1410, 40, 1935, 19.5, 156, 312),
    # NVIDIA A10 and RTX A6000 datasheets, GA102 architecture whitepaper; of the
    # RTX 3060 its product page, and rates by lanes and clock.
    "NVIDIA A10": ((8, 6), 72, 1695, 6, 600, 31.2, 62.5, 125),
    "NVIDIA RTX A6000": ((8, 6), 84, 1800, 6, 768, 38.7, 77.4, 154.8),
    "NVIDIA GeForce RTX 3060": ((8, 6), 28, 1777, 3, 360, 12.7, 12.7, 25.5),
    "NVIDIA GeForce RTX 3080": ((8, 6), 68, 1710, 5, 760, 29.8, 29.8, 59.5),
    "NVIDIA GeForce RTX 3090": ((8, 6), 82, 1695, 6, 936, 35.6, 35.6, 71),
    # NVIDIA Jetson AGX Orin technical brief (64 GB).
    "Orin": ((8, 7), 16, 1300, 4, 204.8, 5.3, 21.2, 42.5),
    # NVIDIA L4, L40 and L40S datasheets, Ada architecture whitepaper.
    "NVIDIA L4": ((8, 9), 58, 2040, 48, 300, 30.3, 60, 121),
    "NVIDIA L40": ((8, 9), 142, 2490, 96, 864, 90.5, 90.5, 181),
    "NVIDIA L40S": ((8, 9), 142, 2520, 96, 864, 91.6, 183, 362),
    "NVIDIA GeForce RTX 4060": ((8, 9), 24, 2460, 24, 272, 15.1, 15.1, 30.2),
    "NVIDIA GeForce RTX 4070": ((8, 9), 46, 2475, 36, 504, 29.1, 29.1, 58.3),
    "NVIDIA GeForce RTX 4080": ((8, 9), 76, 2505, 64, 717, 48.7, 48.7, 97.5),
    "NVIDIA GeForce RTX 4090": ((8, 9), 128, 2520, 72, 1008, 82.6, 82.6, 165.2),
    # NVIDIA RTX Blackwell architecture whitepaper.
    "NVIDIA GeForce RTX 5070": ((12, 0), 48, 2512, 48, 672, 30.9, 30.9, 61.7),
    "NVIDIA GeForce RTX 5080": ((12, 0), 84, 2617, 64, 960, 56.3, 56.3, 112.6),
    "NVIDIA GeForce RTX 5090": (
        (12, 0), 170, 2407, 96, 1792, 104.8, 104.8, 209.5,
    ),
    # NVIDIA DGX Spark datasheet, and GB10 at Hot Chips 2025: 31 TFLOP/s, of
    # which clock and other rates follow as in the rows above.
    "NVIDIA GB10": ((12, 1), 48, 2523, 24, 273, 31, 31, 62),
    # NVIDIA T4 datasheet, Turing architecture whitepaper.
    "Tesla T4": ((7, 5), 40, 1590, 4, 320, 8.1, 8.1, 8.1),
}
# fmt: on
# What people say for a product whose name has more words.
SHORT = {"h100": "NVIDIA H100 80GB HBM3", "gh200": "NVIDIA GH200 480GB"}
