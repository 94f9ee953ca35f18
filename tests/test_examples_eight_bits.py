"""The examples of 8 bits: layers, derivatives, a few steps of training."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples import eight_bits, train_eight_bits
from pallas_gemm import Recipe

_FEW = "--layers=1 --features=32 --heads=2 --hidden=32 --batch=2 --time=16"


@pytest.mark.parametrize(
  "flags",
  [
    "",
    "--scaling=tensor --gradient=none",
    "--scaling=row --forward=int8 --gradient=int8",
  ],
)
def test_layers_are_as_far_off_as_quantising_explains(flags, capsys):
  sizes = ["--tokens=64", "--features=160", "--hidden=96"]
  assert eight_bits.main([*flags.split(), *sizes]) == 0
  *lines, last = capsys.readouterr().out.splitlines()
  assert len(lines) == 4 and last.startswith("PASSED")
  off = [float(re.findall(r"[\d.]+(?=%)", line)[1]) for line in lines]
  # Of the MLP by 8 bits and by 16; of the experts by both.
  assert off[0] > 4 * off[1] and off[2] > 4 * off[3]


def test_a_wrong_layer_is_told(monkeypatch, capsys):
  real = eight_bits.mlp

  def wrong(params, x, recipe):
    return real(params, x, recipe) * (1.3 if recipe else 1)

  monkeypatch.setattr(eight_bits, "mlp", wrong)
  sizes = ["--tokens=16", "--features=32", "--hidden=32"]
  assert eight_bits.main(sizes) == 1
  assert "FAILED" in capsys.readouterr().out


def test_training_prints_means_and_spreads(capsys):
  assert train_eight_bits.main(["--steps=3", "--seeds=2", *_FEW.split()]) == 0
  out = capsys.readouterr().out
  found = re.findall(r"^(\w+): ([\d.]+), spread ([\d.]+) \((.*)\)$", out, re.M)
  assert [name for name, *_ in found] == list(train_eight_bits.RECIPES)
  for _, mean, spread, each in found:
    seeds = [float(x) for x in each.split(", ")]
    assert len(seeds) == 2 and 4 < min(seeds) <= float(mean) <= max(seeds) < 8
    assert abs(max(seeds) - min(seeds) - float(spread)) < 2e-4
  # They are the same model and text, but for rounding.
  means = [float(mean) for _, mean, *_ in found]
  assert 0 < max(means) - min(means) < 0.1
  assert len(re.findall(r"^row, seed 1, step \d: ", out, re.M)) == 3


def test_products_with_weights_are_of_8_bits_and_scores_are_not():
  bits = train_eight_bits.products(Recipe(scaling="tensor")).dot_general
  plain = train_eight_bits.products(None).dot_general
  keys = jax.random.split(jax.random.key(0))
  x = jax.random.normal(keys[0], (2, 8, 4, 16), jnp.bfloat16)
  w = jax.random.normal(keys[1], (4, 16, 3, 24), jnp.bfloat16)
  numbers = ((3, 2), (1, 0)), ((), ())
  want = jax.lax.dot_general(x, w, numbers)
  assert bits(x, w, numbers).shape == want.shape
  np.testing.assert_array_equal(plain(x, w, numbers), want)
  assert (bits(x, w, numbers) != want).mean() > 0.5
  scores = ((3,), (3,)), ((0, 2), (0, 2))
  np.testing.assert_array_equal(bits(x, x, scores), plain(x, x, scores))


def test_batches_are_pieces_of_the_pages():
  pieces = train_eight_bits.batches(3, 4, 30)
  first, second = next(pieces), next(pieces)
  assert first.shape == (4, 31) and (first != second).any()
  np.testing.assert_array_equal(next(train_eight_bits.batches(3, 4, 30)), first)
  piece = first[1].astype(np.uint8).tobytes()
  assert piece in train_eight_bits.text().tobytes()


@pytest.mark.parametrize(
  "flag, said",
  [
    ("--steps=0", "must be 1 or more, got 0"),
    ("--recipes=row,colum", "got colum"),
  ],
)
def test_bad_flags(flag, said, capsys):
  with pytest.raises(SystemExit) as caught:
    train_eight_bits.main([flag])
  assert caught.value.code == 2 and said in capsys.readouterr().err


def test_two_kinds_of_8_bits(capsys):
  with pytest.raises(SystemExit) as caught:
    eight_bits.main(["--gradient=int8"])
  assert caught.value.code == 2
  assert "gradient must be None or of the kind of" in capsys.readouterr().err


@pytest.mark.parametrize("program", [eight_bits, train_eight_bits])
def test_help(program, capsys):
  with pytest.raises(SystemExit) as caught:
    program.main(["--help"])
  assert caught.value.code == 0
  name = program.__name__
  assert f"python -m {name}" in capsys.readouterr().out
