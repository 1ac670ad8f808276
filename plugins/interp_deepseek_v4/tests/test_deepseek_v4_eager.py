"""DeepSeek-V4 beyond its streams: attention over tokens and compressed entries, experts, facts; and who knows of it.

Attention of a layer reads one head of keys, which are the values too, rotated by position; behind the tokens' columns
stand those of compressed entries, one for so many tokens.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from trunks import LAYER_TYPES, PROMPT, RATES, WINDOW, ids_of

from interp_core import Apply, Cache, Replace, capture_attention, run_with_cache
from interp_core.checks import difference

TIGHT = 2e-5
FAR = 1e-2
LAYERS = range(4)
TOP_K = 3
POINTS = [
    f"{point}.*"
    for point in "q_norm_in q_norm_out k_norm_in k_norm_out value z attn_scores attn_probs attn_in attn_out "
    "router_logits expert_weights expert_indices mlp_in mlp_out".split()
]


def count(length: int, layer: int) -> int:
    """How many entries so many tokens have made."""
    rate = RATES[layer]
    return 0 if rate is None else length // rate


def block(deepseek: Any, layer: int) -> Any:
    backend: Any = deepseek.model.session.backend()
    return backend.model.model.layers[layer]


ENTRIES: dict[int, torch.Tensor] = {}
"""What the compressor of each layer gave in the run of ``plain``."""


@pytest.fixture(scope="module")
def plain(deepseek: Any) -> Cache:
    """Every point of one prompt, and beside it the entries, by hooks of our own on the compressors."""
    handles = [
        block(deepseek, i).self_attn.compressor.register_forward_hook(
            lambda module, args, out, i=i: ENTRIES.__setitem__(i, out[0].detach().clone())
        )
        for i in LAYERS
        if RATES[i]
    ]
    cache = run_with_cache(deepseek.model, PROMPT, POINTS)
    for handle in handles:
        handle.remove()
    return cache


def entries(plain: Cache, layer: int) -> torch.Tensor:
    """Compressed entries ``[entries, head_dim]`` as the compressor's module gives them; none on a layer without one."""
    # ``[batch, 1, entries, head_dim]``.
    return ENTRIES[layer][0, 0] if RATES[layer] else torch.zeros(0, 32)


def rotated(rows: torch.Tensor, layer: int, *, back: bool = False) -> torch.Tensor:
    """``[pos, ..., head_dim]`` with each pair of the last 8 channels turned by its angle, as complex numbers."""
    base = 10000.0 if LAYER_TYPES[layer] == "sliding_attention" else 160000.0
    angles = torch.arange(rows.shape[0])[:, None] * base ** (-torch.arange(0, 8, 2) / 8)
    angles = angles.reshape(-1, *[1] * (rows.dim() - 2), 4)
    turn = torch.polar(torch.ones_like(angles), -angles if back else angles)
    pairs = torch.view_as_complex(rows[..., -8:].unflatten(-1, (4, 2)).contiguous())
    return torch.cat([rows[..., :-8], torch.view_as_real(pairs * turn).flatten(-2)], dim=-1)


# Attention.


def test_query_and_key_norms(deepseek: Any, plain: Cache) -> None:
    for i in LAYERS:
        attention = block(deepseek, i).self_attn
        assert plain[f"q_norm_in.{i}"].shape == plain[f"q_norm_out.{i}"].shape == (1, 21, 4, 32)
        assert plain[f"k_norm_in.{i}"].shape == plain[f"k_norm_out.{i}"].shape == (1, 21, 1, 32)
        for name, gain in (("q", torch.ones(32)), ("k", attention.kv_norm.weight)):
            before, after = plain[f"{name}_norm_in.{i}"], plain[f"{name}_norm_out.{i}"]
            made = before * (before.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
            assert difference(made * gain, after) < TIGHT
            assert difference(before, after) > FAR
            if name == "k":
                assert difference(made, after) > FAR
        with torch.no_grad():
            x = plain[f"attn_in.{i}"]
            assert difference(attention.kv_proj(x).unsqueeze(2), plain[f"k_norm_in.{i}"]) < TIGHT
            query = attention.q_b_proj(attention.q_a_norm(attention.q_a_proj(x))).unflatten(-1, (4, 32))
        assert difference(query, plain[f"q_norm_in.{i}"]) < TIGHT
        assert difference(query.unflatten(-2, (2, 2)).transpose(2, 3).flatten(2, 3), plain[f"q_norm_in.{i}"]) > FAR


def test_the_value_is_the_rotated_key(plain: Cache) -> None:
    for i in LAYERS:
        key, value = plain[f"k_norm_out.{i}"][0], plain[f"value.{i}"][0]
        assert value.shape == (21, 1, 32)
        assert difference(rotated(key, i), value) < TIGHT
        assert difference(key, value) > FAR
        assert difference(rotated(key, i, back=True), value) > FAR
        other = next(j for j in LAYERS if (LAYER_TYPES[j] == LAYER_TYPES[0]) != (i == 0))
        assert difference(rotated(key, other), value) > FAR  # Layers with entries turn at another speed.


def test_z_is_what_the_output_projection_reads(deepseek: Any, plain: Cache) -> None:
    for i in LAYERS:
        attention, z = block(deepseek, i).self_attn, plain[f"z.{i}"]
        assert z.shape == (1, 21, 4, 32)
        with torch.no_grad():
            right, wrong = (
                attention.o_b_proj(attention.o_a_proj(rows.reshape(1, 21, 2, 64)).flatten(2))
                for rows in (z, z.roll(1, -2))
            )
        assert difference(right, plain[f"attn_out.{i}"]) < TIGHT
        assert difference(wrong, plain[f"attn_out.{i}"]) > FAR


def test_identity_4_z_of_tokens_and_entries(plain: Cache) -> None:
    for i in LAYERS:
        probs, z = plain[f"attn_probs.{i}"][0], plain[f"z.{i}"][0]
        values = torch.cat([plain[f"value.{i}"][0, :, 0], entries(plain, i)])
        assert probs.shape == (4, 21, len(values))
        read = (probs @ values).transpose(0, 1)
        assert difference(rotated(read, i, back=True), z) < TIGHT
        assert difference(read, z) > FAR
        assert difference(rotated((probs.roll(1, 0) @ values).transpose(0, 1), i, back=True), z) > FAR
        if RATES[i]:
            without = (probs[..., :21] @ values[:21]).transpose(0, 1)
            assert difference(rotated(without, i, back=True), z) > FAR


def test_identity_5_scores_and_their_softmax_with_sinks(deepseek: Any, plain: Cache) -> None:
    for i in LAYERS:
        scores, probs = plain[f"attn_scores.{i}"][0], plain[f"attn_probs.{i}"][0]
        keys = torch.cat([plain[f"value.{i}"][0, :, 0], entries(plain, i)])
        query = rotated(plain[f"q_norm_out.{i}"][0], i).transpose(0, 1)
        seen = torch.isfinite(scores)
        assert difference((query @ keys.T * 32**-0.5)[seen], scores[seen]) < TIGHT
        assert difference((query.roll(1, 0) @ keys.T * 32**-0.5)[seen], scores[seen]) > FAR
        sinks = block(deepseek, i).self_attn.sinks.detach()[:, None, None]
        weights = scores.exp()
        assert difference(weights / (weights.sum(-1, keepdim=True) + sinks.exp()), probs) < TIGHT
        assert difference(scores.softmax(-1), probs) > FAR
        assert torch.equal(probs > 0, seen)
        assert float(probs.sum(-1).max()) < 1.0


def test_identity_5_exactly_the_keys_of_the_window_and_the_entries(plain: Cache) -> None:
    at = torch.arange(21)
    behind = at[:, None] - at[None]
    for i in LAYERS:
        scores = plain[f"attn_scores.{i}"][0]
        seen = torch.isfinite(scores)
        assert torch.equal(seen[:, :, :21], ((behind >= 0) & (behind < WINDOW)).expand(4, -1, -1))
        assert int(seen[0, 20, :21].sum()) == WINDOW
        rate = RATES[i]
        assert scores.shape[-1] == 21 + count(21, i)
        if rate is None:
            continue
        ready = (at + 1) // rate
        visible = seen[:, :, 21:]
        most = TOP_K if LAYER_TYPES[i].startswith("compressed_sparse") else 99
        assert torch.equal(visible.sum(-1), ready.clamp(max=most).expand(4, -1))
        assert not bool((visible & (torch.arange(visible.shape[-1]) >= ready[:, None])).any())
        if most == TOP_K:
            newest = torch.arange(visible.shape[-1]) >= ready[:, None] - TOP_K
            assert int(ready.max()) > TOP_K
            assert bool((visible & ~newest).any())  # The indexer chooses: it is no second window.


def test_columns_say_what_they_are(plain: Cache) -> None:
    for i in LAYERS:
        made = count(21, i)
        for point in ("attn_scores", "attn_probs"):
            address = f"{point}.{i}"
            labels = plain.key_labels(address)
            assert labels == [f"token {t}" for t in range(21)] + [f"entry {e}" for e in range(made)]
            found = {str(a): n for a, n in plain.entries.items()}.get(address)
            assert found == ((made,) if made else None)


def columns(cache: Cache, address: str, row: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of one prompt of a batch, ``[heads, query, key]`` of its tokens and of its own entries."""
    tensor = cache[address][row]
    tokens = sum(label.startswith("token") for label in cache.key_labels(address))
    own = next((n[row] for a, n in cache.entries.items() if str(a) == address), 0)
    return tensor[:, :length, :length], tensor[:, :length, tokens : tokens + own]


def finite(x: torch.Tensor) -> torch.Tensor:
    return x.nan_to_num(neginf=-50.0)


def test_entries_in_a_batch_of_unequal_prompts(deepseek: Any) -> None:
    rows = [PROMPT, ids_of(3, 1), ids_of(9, 2)]
    points = ["attn_scores.*", "attn_probs.*"]
    batch = run_with_cache(deepseek.model, rows, points)
    counts = {str(a): n for a, n in batch.entries.items()}
    for i in LAYERS:
        rate = RATES[i]
        expected = tuple(count(len(row), i) for row in rows) if rate else None
        for point, masked in (("attn_scores", float("-inf")), ("attn_probs", 0.0)):
            address = f"{point}.{i}"
            assert counts.get(address) == expected
            assert batch[address].shape == (3, 4, 21, 21 + count(21, i))
            for row, ids in enumerate(rows):
                n = len(ids)
                alone = run_with_cache(deepseek.model, ids, [address])
                assert bool(alone.entries) is (count(n, i) > 0)
                assert alone[address].shape[-1] == n + count(n, i)
                for got, want in zip(columns(batch, address, row, n), columns(alone, address, 0, n), strict=True):
                    assert got.shape == want.shape
                    if got.numel():
                        assert difference(finite(got), finite(want)) < TIGHT, (address, row)
                # What is no key of this prompt is masked: other tokens' columns, other prompts' entries.
                rest = batch[address][row, :, :n, n:21]
                more = batch[address][row, :, :n, 21 + count(n, i) :]
                assert bool((rest == masked).all())
                assert bool((more == masked).all())
                assert not bool(batch[address][row, :, n:].any())


def test_entries_of_a_padded_tensor(deepseek: Any) -> None:
    rows = [PROMPT, ids_of(9, 2)]
    padded, mask = torch.zeros(2, 23, dtype=torch.long), torch.zeros(2, 23, dtype=torch.long)
    for i, row in enumerate(rows):
        padded[i, -len(row) :], mask[i, -len(row) :] = torch.tensor(row), 1
    left = run_with_cache(deepseek.model, padded, ["attn_probs.1"], attention_mask=mask)
    assert left["attn_probs.1"].shape == (2, 4, 23, 23 + 5)
    assert left.key_labels("attn_probs.1")[22:24] == ["token 22", "entry 0"]
    for i, row in enumerate(rows):
        n = len(row)
        want = run_with_cache(deepseek.model, row, ["attn_probs.1"])["attn_probs.1"][0]
        assert difference(left["attn_probs.1"][i, :, -n:, 23 - n : 23], want[:, :, :n]) < TIGHT
        assert difference(left["attn_probs.1"][i, :, -n:, 23 : 23 + n // 4], want[:, :, n:]) < TIGHT
        assert not bool(left["attn_probs.1"][i, :, -n:, 23 + n // 4 :].any())


def test_entries_at_chosen_positions(deepseek: Any, plain: Cache) -> None:
    points = ["attn_scores.*", "attn_probs.*", "value.*"]
    some = run_with_cache(deepseek.model, PROMPT, points, positions=[3, 17, 20])
    for i in LAYERS:
        for point in ("attn_scores", "attn_probs"):
            address = f"{point}.{i}"
            assert torch.equal(some[address], plain[address][:, :, [3, 17, 20]])
            assert some.key_labels(address) == plain.key_labels(address)
        assert torch.equal(some[f"value.{i}"], plain[f"value.{i}"][:, [3, 17, 20]])
    last = run_with_cache(deepseek.model, [PROMPT, ids_of(9, 2)], points, positions="last")
    assert difference(last["attn_probs.1"][0, :, 0], plain["attn_probs.1"][0, :, 20]) < TIGHT
    short = run_with_cache(deepseek.model, ids_of(9, 2), points)["attn_probs.1"][0, :, 8]
    assert difference(last["attn_probs.1"][1, :, 0, :9], short[:, :9]) < TIGHT
    assert difference(last["attn_probs.1"][1, :, 0, 21:23], short[:, 9:]) < TIGHT


def test_one_head_of_a_matrix_with_entries(deepseek: Any, plain: Cache) -> None:
    address = "attn_probs.1.head-2"
    one = run_with_cache(deepseek.model, PROMPT, [address])
    assert torch.equal(one[address], plain["attn_probs.1"][:, 2])
    assert not torch.equal(one[address], plain["attn_probs.1"][:, 1])
    assert one.key_labels(address) == plain.key_labels("attn_probs.1")


def test_a_saved_cache_keeps_its_entries(plain: Cache, tmp_path: Path) -> None:
    loaded = Cache.load(plain.save(tmp_path / "cache.safetensors"))
    assert plain.entries
    assert loaded.entries == plain.entries
    assert plain.to("cpu").entries == plain.entries
    for i in LAYERS:
        assert loaded.key_labels(f"attn_probs.{i}") == plain.key_labels(f"attn_probs.{i}")
        assert torch.equal(loaded[f"attn_probs.{i}"], plain[f"attn_probs.{i}"])


def test_attention_records(deepseek: Any, plain: Cache) -> None:
    records = capture_attention(deepseek.model, PROMPT, list(LAYERS))
    for i in LAYERS:
        record = records[i]
        assert record.entries == count(21, i)
        assert record.probs.shape[-1] == 21 + record.entries
        assert torch.equal(record.probs, plain[f"attn_probs.{i}"][0])
        assert torch.equal(record.scores, plain[f"attn_scores.{i}"][0])
        assert torch.equal(record.value, plain[f"value.{i}"][0].transpose(0, 1))


def test_entries_while_generating_equal_one_run(deepseek: Any) -> None:
    points = ["attn_scores.*", "attn_probs.*", "value.*", "z.*", "expert_weights.*", "expert_indices.*", "lm_head"]
    # Prompts that end inside an entry, at the end of one, and before the first one of a layer.
    for length in (10, 8, 3):
        completion, grown = deepseek.model.capture_generation(ids_of(length, 4), points, max_tokens=11, ignore_eos=True)
        ids = [*completion.prompt_token_ids, *completion.token_ids[:-1]]
        once = run_with_cache(deepseek.model, ids, points)
        assert grown.entries == once.entries
        for key in once:
            assert grown[key].shape == once[key].shape, key
            a, b = finite(grown[key].float()), finite(once[key].float())
            assert difference(a, b) < TIGHT, (key, length)
        for i in LAYERS:
            assert grown.key_labels(f"attn_probs.{i}") == once.key_labels(f"attn_probs.{i}")
            assert torch.equal(torch.isinf(grown[f"attn_scores.{i}"]), torch.isinf(once[f"attn_scores.{i}"]))
            assert difference(grown[f"attn_probs.{i}"].roll(1, -1), once[f"attn_probs.{i}"]) > FAR


def test_batches_of_attention_inputs_equal_one_by_one(deepseek: Any) -> None:
    """The rotation of values depends on positions, which padding and cut-off prefixes must not shift."""
    points = ["value.*", "z.*", "q_norm_out.*", "k_norm_out.*"]
    rows = [PROMPT, ids_of(5, 1)]
    batch = run_with_cache(deepseek.model, rows, points)
    for row, ids in enumerate(rows):
        alone = run_with_cache(deepseek.model, ids, points)
        for key in alone:
            assert difference(batch[key][row, : len(ids)], alone[key][0]) < TIGHT, key


def test_writes_to_keys_reach_values_and_scores(deepseek: Any, plain: Cache) -> None:
    vector = torch.linspace(-2, 2, 32).reshape(1, 32)

    def moved(rows: torch.Tensor) -> torch.Tensor:
        return rows + vector

    points = ["k_norm_out.1", "value.1", "attn_scores.1", "z.1"]
    changed = run_with_cache(deepseek.model, PROMPT, points, steering=[Apply("k_norm_out.1", moved)])
    assert difference(changed["k_norm_out.1"], plain["k_norm_out.1"] + vector) < TIGHT
    assert difference(rotated(changed["k_norm_out.1"][0], 1), changed["value.1"][0]) < TIGHT
    assert difference(changed["value.1"], plain["value.1"]) > FAR
    # Entries have keys of their own, which are those of the plain run.
    keys = torch.cat([changed["value.1"][0, :, 0], entries(plain, 1)])
    query = rotated(plain["q_norm_out.1"][0], 1).transpose(0, 1)
    scores = changed["attn_scores.1"][0]
    seen = torch.isfinite(scores)
    assert difference((query @ keys.T * 32**-0.5)[seen], scores[seen]) < TIGHT


# Experts.


def routed(deepseek: Any, cache: Cache, i: int, weights: torch.Tensor) -> torch.Tensor:
    """The chosen experts of each token, combined by hand."""
    experts = block(deepseek, i).mlp.experts
    x, indices = cache[f"mlp_in.{i}"][0], cache[f"expert_indices.{i}"][0]
    total = torch.zeros_like(x)
    with torch.no_grad():
        for t in range(x.shape[0]):
            for k in range(indices.shape[1]):
                gate, up = (experts.gate_up_proj[indices[t, k]] @ x[t]).chunk(2)
                hidden = torch.nn.functional.silu(gate.clamp(max=1.0)) * up.clamp(-1.0, 1.0)
                total[t] += weights[t, k] * (experts.down_proj[indices[t, k]] @ hidden)
    return total


def shared(deepseek: Any, cache: Cache, i: int) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = block(deepseek, i).mlp.shared_experts(cache[f"mlp_in.{i}"][0])
    return found


def test_identity_7_experts_by_hand(deepseek: Any, plain: Cache) -> None:
    for i in LAYERS:
        weights, out = plain[f"expert_weights.{i}"][0], plain[f"mlp_out.{i}"][0]
        beside = shared(deepseek, plain, i)
        assert difference(routed(deepseek, plain, i, weights) + beside, out) < TIGHT
        assert difference(routed(deepseek, plain, i, weights.roll(1, -1)) + beside, out) > FAR
        assert difference(routed(deepseek, plain, i, weights), out) > FAR
        assert float((weights.sum(-1) - 1.5).abs().max()) < TIGHT  # The routed scaling factor.
        assert float(weights.min()) >= 0.0


def test_indices_and_weights_come_from_the_logits(deepseek: Any, plain: Cache) -> None:
    table = block(deepseek, 0).mlp.gate.tid2eid
    indices = plain["expert_indices.0"][0]
    assert not indices.is_floating_point()
    assert torch.equal(indices, table[PROMPT])
    assert not torch.equal(indices, table[PROMPT].roll(1, 0))
    for i in LAYERS:
        logits, chosen = plain[f"router_logits.{i}"][0], plain[f"expert_indices.{i}"][0]
        gate = block(deepseek, i).mlp.gate
        with torch.no_grad():
            assert difference(plain[f"mlp_in.{i}"][0] @ gate.weight.T, logits) < TIGHT
        scores = torch.nn.functional.softplus(logits).sqrt()
        taken = scores.gather(1, chosen)
        weights = plain[f"expert_weights.{i}"][0]
        assert difference(1.5 * taken / taken.sum(-1, keepdim=True), weights) < TIGHT
        assert difference(1.5 * taken.flip(-1) / taken.sum(-1, keepdim=True), weights) > FAR
        best = (scores + (0 if i == 0 else gate.e_score_correction_bias)).topk(2).indices
        assert (best.sort(-1).values == chosen.sort(-1).values).all() == (i > 0)


def test_a_write_of_expert_weights_scales_the_routed_part(deepseek: Any, plain: Cache) -> None:
    for i in LAYERS:
        address, out = f"expert_weights.{i}", f"mlp_out.{i}"
        beside = shared(deepseek, plain, i)
        part = plain[out][0] - beside
        for factor in (0.0, 2.0):
            steering = [Apply(address, partial(torch.mul, factor))]
            changed = run_with_cache(deepseek.model, PROMPT, [address, out], steering=steering)
            assert difference(changed[address], factor * plain[address]) < TIGHT
            assert difference(changed[out][0], factor * part + beside) < TIGHT
            assert difference(changed[out], plain[out]) > FAR
        one = Replace(address, torch.tensor([0.7, 0.0]))
        with deepseek.model.steer(one, positions=[5]):
            changed = run_with_cache(deepseek.model, PROMPT, [address, out, f"mlp_in.{i}", f"expert_indices.{i}"])
        weights = plain[address][0].clone()
        weights[5] = torch.tensor([0.7, 0.0])
        assert torch.equal(changed[address][0], weights)
        assert difference(routed(deepseek, changed, i, weights) + beside, changed[out][0]) < TIGHT
        assert difference(changed[out][0, :5], plain[out][0, :5]) < 2e-6
