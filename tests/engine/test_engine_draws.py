"""Random numbers by seed and position."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from looseleaf.engine.draws import UniformDraws
from looseleaf.engine.sampling import draw_uniform


@settings(max_examples=50)
@given(st.integers(-(2**63), 2**64), st.lists(st.integers(0, 5000), min_size=1, max_size=20))
def test_draws_ahead_equal_single_draws(seed, positions):
    """Numbers made ahead are those of `draw_uniform`, in whatever order positions are asked for."""
    draws = UniformDraws(seed)
    for position in positions:
        assert draws.at(position) == draw_uniform(seed, position)
        assert draws.at(position + 1) == draw_uniform(seed, position + 1)


def test_all_positions_of_a_run():
    """No position of a long run differs, at the edges of what is made ahead either."""
    draws = UniformDraws(11)
    assert [draws.at(position) for position in range(300)] == [draw_uniform(11, position) for position in range(300)]
