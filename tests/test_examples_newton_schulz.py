"""The example of an inverse square root in float32."""

import pytest

from examples import newton_schulz


@pytest.mark.parametrize(
  "flags", ("--size=100", "--size=40 --implementation=sm90 --steps=9")
)
def test_it_converges(flags, capsys):
  assert newton_schulz.main(flags.split()) == 0
  *steps, last = capsys.readouterr().out.splitlines()
  off = [float(line.rpartition(" ")[2]) for line in steps]
  assert off[:7] == sorted(off[:7], reverse=True) and off[-1] < 1e-4
  assert last.startswith("PASSED")


def test_too_few_steps_fail(capsys):
  assert newton_schulz.main(["--size=40", "--steps=3"]) == 1
  assert "FAILED" in capsys.readouterr().out


@pytest.mark.parametrize("flag", ("--size=0", "--steps=-1", "--condition=0.5"))
def test_wrong_sizes(flag, capsys):
  with pytest.raises(SystemExit) as caught:
    newton_schulz.main([flag])
  assert caught.value.code == 2
  assert "must be 1 or more" in capsys.readouterr().err
