"""Types of the arguments of ops, which `help` prints by these names."""

from collections.abc import Sequence
from typing import Literal

import jax
from jax.sharding import NamedSharding, PartitionSpec

from pallas_gemm import tuning
from pallas_gemm.kernels import triton_config
from pallas_gemm.quantization import Quantized
from pallas_gemm.splitting import Split

type ArrayLike = jax.typing.ArrayLike
type Operand = ArrayLike | Quantized | Split
type DTypeLike = jax.typing.DTypeLike
type PrecisionLike = jax.lax.PrecisionLike
type Sharding = NamedSharding | PartitionSpec

type _Name = Literal["sm90", "triton", "xla"]
type _GroupedName = Literal["sm90", "xla"]
type Implementation = _Name | Sequence[_Name]
type GroupedImplementation = _GroupedName | Sequence[_GroupedName]

type GroupedConfig = tuning.Config
type Config = tuning.Config | triton_config.Config
