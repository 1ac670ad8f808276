"""The reference kernels against transformers' own modules, without an engine. Each with a case that must fail."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.testing import assert_close
from transformers import DeepseekV4Config
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as theirs

from interp_deepseek_v4.kernels import attention, compressor, hyper, indexer, metadata, rope, routing
from interp_deepseek_v4.kernels.registry import Kernel, compiled
from interp_deepseek_v4.kernels.store import STORE, SideStore

TOKENS, STREAMS, HIDDEN, RATIO = 11, 4, 48, 4
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


def differs(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Clearly more than rounding."""
    return float((got - want).abs().max()) > 1e-2


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def config() -> DeepseekV4Config:
    return DeepseekV4Config(
        vocab_size=64,
        hidden_size=HIDDEN,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        head_dim=128,
        q_lora_rank=16,
        num_experts_per_tok=2,
        n_routed_experts=8,
        n_shared_experts=1,
        max_position_embeddings=64,
        o_groups=2,
        o_lora_rank=8,
        index_n_heads=8,
        index_head_dim=128,
        index_topk=3,
        hc_mult=STREAMS,
        qk_rope_head_dim=64,
        layer_types=["sliding_attention", "compressed_sparse_attention"],
        compress_rates={"compressed_sparse_attention": RATIO, "heavily_compressed_attention": 128},
        mlp_layer_types=["hash_moe", "moe"],
        routed_scaling_factor=1.7,
    )


def filled(module: Any) -> Any:
    """The module with random parameters, so that nothing is a no-op."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(0.3 * torch.randn_like(parameter) + (parameter.dim() == 1))
    return module.eval()


def rope_table(config: DeepseekV4Config, kind: str = "compress") -> torch.Tensor:
    """Transformers' angles in the layout of vLLM's table: `[positions, cosines | sines]`."""
    positions = torch.arange(config.max_position_embeddings).unsqueeze(0)
    angles = theirs.DeepseekV4RotaryEmbedding(config)(torch.zeros(1), positions, layer_type=kind)
    return torch.cat([part[0] for part in angles], dim=-1)


def test_hyper_connection_pre_and_post(config: DeepseekV4Config) -> None:
    module = filled(theirs.DeepseekV4HyperConnection(config))
    streams, output = torch.randn(TOKENS, STREAMS, HIDDEN), torch.randn(TOKENS, HIDDEN)
    arguments = (module.fn, module.scale, module.base, STREAMS)
    with torch.no_grad():
        post, comb, collapsed = (part[0] for part in module(streams.unsqueeze(0)))
        got = hyper.hc_pre_fused_cpu(streams, *arguments, config.hc_sinkhorn_iters, config.rms_norm_eps, config.hc_eps)
        hasty = hyper.hc_pre_fused_cpu(streams, *arguments, 1, config.rms_norm_eps, config.hc_eps)
    for mine, want in zip(got, (collapsed, post, comb), strict=True):
        assert_close(mine, want, **CLOSE)
    assert differs(hasty[2], comb), "one Sinkhorn iteration must not be enough"

    want = post.unsqueeze(-1) * output.unsqueeze(-2) + comb.transpose(-1, -2) @ streams
    assert_close(hyper.hc_post_fused_cpu(output, streams, post, comb), want, **CLOSE)
    assert differs(hyper.hc_post_fused_cpu(output, streams, post, comb.transpose(-1, -2)), want)


def test_hyper_connections_return_the_dtype_of_the_streams(config: DeepseekV4Config) -> None:
    module = filled(theirs.DeepseekV4HyperConnection(config))
    streams = torch.randn(TOKENS, STREAMS, HIDDEN, dtype=torch.bfloat16)
    collapsed, post, comb = hyper.hc_pre_fused_cpu(
        streams, module.fn, module.scale, module.base, STREAMS, 20, 1e-6, 1e-6
    )
    assert (collapsed.dtype, post.dtype, comb.dtype) == (torch.bfloat16, torch.float32, torch.float32)
    assert hyper.hc_post_fused_cpu(collapsed, streams, post, comb).dtype == torch.bfloat16


def test_head_contraction(config: DeepseekV4Config) -> None:
    module = filled(theirs.DeepseekV4HyperHead(config))
    streams = torch.randn(TOKENS, STREAMS, HIDDEN)
    arguments = (module.hc_fn, module.hc_scale, module.hc_base, config.hc_eps, config.rms_norm_eps)
    with torch.no_grad():
        want = module(streams.unsqueeze(0))[0]
        assert_close(hyper.hc_head_fused_cpu(streams, *arguments), want, **CLOSE)
        assert differs(hyper.hc_head_fused_cpu(streams.flip(1), *arguments), want)


def test_rope_and_its_inverse(config: DeepseekV4Config) -> None:
    table, positions = rope_table(config), torch.randint(1, 64, (TOKENS,))
    heads = torch.randn(TOKENS, 3, 128)
    cos, sin = (part[positions].unsqueeze(0) for part in table.chunk(2, dim=-1))
    want = theirs.apply_rotary_pos_emb(heads.transpose(0, 1).unsqueeze(0), cos, sin)[0].transpose(0, 1)
    turned = rope.rotate(heads, positions, table)
    assert_close(turned, want, **CLOSE)
    assert_close(rope.inverse_gptj_rope_o_proj_cpu(turned, positions, table, 64), heads, **CLOSE)
    assert_close(rope.rotate(heads[:, 0], positions, table), want[:, 0], **CLOSE)
    assert differs(rope.rotate(turned, positions, table), heads), "turning on is not turning back"
    assert differs(rope.rotate(heads, positions - 1, table), want)
    with pytest.raises(ValueError, match="32"):
        rope.inverse_gptj_rope_o_proj_cpu(turned, positions, table, 32)


def test_hash_routing(config: DeepseekV4Config) -> None:
    module = filled(theirs.DeepseekV4HashRouter(config))
    module.tid2eid.copy_(torch.rand(64, 8).argsort(-1)[:, :2])
    hidden, ids = torch.randn(TOKENS, HIDDEN), torch.randint(0, 64, (TOKENS,))
    with torch.no_grad():
        logits, weights, experts = module(hidden, ids)
    rest = (2, "sqrtsoftplus", 0, 8, config.routed_scaling_factor)
    got_weights, got_experts = routing.hash_topk_cpu(logits, module.tid2eid[ids].int(), *rest)
    assert_close(got_weights, weights, **CLOSE)
    assert got_experts.dtype == torch.int32
    assert torch.equal(got_experts.long(), experts)
    other, _ = routing.hash_topk_cpu(logits, (module.tid2eid[ids].int() + 1) % 8, *rest)
    assert differs(other, weights)
    with pytest.raises(ValueError, match="softmax"):
        routing.hash_topk_cpu(logits, module.tid2eid[ids].int(), 2, "softmax", 0, 8, 1.0)


def test_biased_routing(config: DeepseekV4Config) -> None:
    module = filled(theirs.DeepseekV4TopKRouter(config))
    module.e_score_correction_bias.copy_(2 * torch.randn(8))
    hidden = torch.randn(TOKENS, HIDDEN)
    with torch.no_grad():
        logits, weights, experts = module(hidden)
    rest = (2, True, "sqrtsoftplus", 0, config.routed_scaling_factor, True)
    got_weights, got_experts = routing.biased_topk_cpu(hidden, logits, module.e_score_correction_bias, *rest)
    assert_close(got_weights, weights, **CLOSE)
    assert torch.equal(got_experts.long(), experts)
    _, unbiased = routing.biased_topk_cpu(hidden, logits, torch.zeros(8), *rest)
    assert not torch.equal(unbiased.sort(-1).values.long(), experts.sort(-1).values), "the bias must matter here"


def empty_cache(blocks: int, block_size: int, row_bytes: int = 584) -> torch.Tensor:
    """A cache like vLLM's: the pages of a layer inside blocks that hold other layers too."""
    whole = torch.zeros(blocks, 2 * block_size * row_bytes, dtype=torch.uint8)
    return whole[:, : block_size * row_bytes]


def test_the_side_store_returns_exact_rows_and_takes_slots_again() -> None:
    store, cache = SideStore(), empty_cache(6, 4)
    slots, rows = torch.tensor([21, -1, 2, 9]), torch.randn(4, 512)
    store.write(cache, 4, slots, rows)
    got = store.read(cache, 4, torch.tensor([[9, 21], [-1, 2]]), 512)
    assert torch.equal(got, torch.stack((torch.stack((rows[3], rows[0])), torch.stack((torch.zeros(512), rows[2])))))
    store.write(cache, 4, torch.tensor([9]), rows[:1])
    assert torch.equal(store.read(cache, 4, torch.tensor([9, 2]), 512), rows[[0, 2]])


def test_the_side_store_refuses_what_it_did_not_write() -> None:
    store, cache = SideStore(), empty_cache(6, 4)
    with pytest.raises(RuntimeError, match="did not write"):
        store.read(cache, 4, torch.tensor([3]), 512)
    store.write(cache, 4, torch.tensor([3, 8]), torch.randn(2, 512))
    with pytest.raises(RuntimeError, match="did not write"):
        store.read(cache, 4, torch.tensor([9]), 512)
    cache[0] = 7  # another layer was given the block
    assert store.read(cache, 4, torch.tensor([8]), 512).shape == (1, 512)
    with pytest.raises(RuntimeError, match="first: 3"):
        store.read(cache, 4, torch.tensor([8, 3]), 512)


def test_the_side_store_forgets_caches_that_are_gone() -> None:
    store, cache = SideStore(), empty_cache(2, 4)
    store.write(cache, 4, torch.tensor([1]), torch.randn(1, 512))
    del cache
    other = empty_cache(2, 4)
    store.write(other, 4, torch.tensor([1]), torch.randn(1, 512))
    assert len(store._tables) == 1


def test_attention_over_window_and_compressed_entries() -> None:
    window, compressed = empty_cache(4, 8), empty_cache(4, 2)
    keys, entries = torch.randn(TOKENS, 512), torch.randn(3, 512)
    STORE.write(window, 8, torch.arange(TOKENS) + 8, keys)
    STORE.write(compressed, 2, torch.arange(3) + 4, entries)
    q, sink = torch.randn(TOKENS, 2, 512), torch.randn(2)
    positions = torch.arange(TOKENS)
    causal = positions.unsqueeze(0) <= positions.unsqueeze(1)
    ready = torch.arange(3) < ((positions + 1) // RATIO).unsqueeze(1)
    out = torch.empty_like(q)

    def run(window_slots: torch.Tensor) -> torch.Tensor:
        entry_slots = (torch.arange(3) + 4).expand(TOKENS, 3).masked_fill(~ready, -1)
        attention.flash_mla_with_kvcache_cpu(out, q, window, window_slots, 8, compressed, entry_slots, 2, sink, 0.05)
        return out.clone()

    module = torch.nn.Module()
    module.num_key_value_groups, module.sinks = 2, sink
    everything = torch.cat((keys, entries)).view(1, 1, -1, 512)
    mask = torch.where(torch.cat((causal, ready), dim=1), 0.0, float("-inf"))[None, None]
    want, _ = theirs.eager_attention_forward(module, q.transpose(0, 1)[None], everything, everything, mask, 0.05)
    slots = (positions + 8).expand(TOKENS, TOKENS)
    assert_close(run(slots.masked_fill(~causal, -1)), want[0], **CLOSE)
    assert differs(run(slots), want[0]), "what the slots leave out must not be seen"


def compressed_by_kernels(
    kv: torch.Tensor, gate: torch.Tensor, module: torch.nn.Module, table: torch.Tensor, cuts: list[int]
) -> torch.Tensor:
    """The entries of one sequence that comes in pieces, through the cache of states: `[entries, D]`."""
    channels, cache, states = (
        kv.shape[-1] // 2,
        empty_cache(4, 2, 4 * kv.shape[-1]),
        torch.zeros(16, 4, 2 * kv.shape[-1]),
    )
    for start, stop in zip([0, *cuts], [*cuts, kv.shape[0]], strict=True):
        positions = torch.arange(start, stop)
        compressor.save_partial_states_cpu(
            kv[start:stop], gate[start:stop], module.position_bias, positions, states, positions + 4
        )
        before = positions.unsqueeze(-1) - 2 * RATIO + 1 + torch.arange(2 * RATIO)
        compressor.compress_and_store(
            states,
            torch.where(before >= 0, before + 4, -1),
            positions,
            torch.where((positions + 1) % RATIO == 0, positions // RATIO, -1),
            module.kv_norm.weight,
            1e-6,
            table,
            cache,
            2,
            RATIO,
        )
    return STORE.read(cache, 2, torch.arange(kv.shape[0] // RATIO), channels)


@torch.no_grad()
def test_compressed_entries(config: DeepseekV4Config) -> None:
    module, table = filled(theirs.DeepseekV4CSACompressor(config)), rope_table(config)
    hidden, positions = torch.randn(1, 14, HIDDEN), torch.arange(14).unsqueeze(0)
    want = module(hidden, torch.randn(1, 14, 16), positions, None, 1)[0][0, 0]
    kv, gate = module.kv_proj(hidden)[0], module.gate_proj(hidden)[0]
    assert_close(compressed_by_kernels(kv, gate, module, table, []), want, **CLOSE)
    assert_close(compressed_by_kernels(kv, gate, module, table, [3, 6, 7]), want, **CLOSE)
    assert differs(compressed_by_kernels(kv.flip(-1), gate, module, table, []), want), "which half is whose matters"


@torch.no_grad()
def test_the_indexer_chooses_what_transformers_chooses(config: DeepseekV4Config) -> None:
    module, table = filled(theirs.DeepseekV4Indexer(config)), rope_table(config)
    hidden, residual, positions = torch.randn(1, 30, HIDDEN), torch.randn(1, 30, 16), torch.arange(30).unsqueeze(0)
    want = module(hidden, residual, positions, None, 1)[0]
    entries = compressed_by_kernels(module.kv_proj(hidden)[0], module.gate_proj(hidden)[0], module, table, [])
    cache, block_size = empty_cache(8, 2), 2
    STORE.write(cache, block_size, torch.arange(entries.shape[0]) + 2, entries)
    queries, weights = indexer.exact_queries(
        positions[0],
        module.q_b_proj(residual)[0].view(30, 8, 128),
        table,
        module.scorer.weights_proj(hidden)[0],
        128**-0.5,
        8**-0.5,
    )
    ready, pages = (positions[0] + 1) // RATIO, (torch.arange(4) + 1).expand(30, 4)

    def choose(queries: torch.Tensor) -> torch.Tensor:
        scores = indexer.fp8_paged_mqa_logits_cpu(queries, cache, weights, ready, pages, block_size, 9)
        slots, places = (torch.zeros(30, 3, dtype=torch.int32) for _ in range(2))
        indexer.topk_transform_512_cpu(scores, ready, pages, slots, block_size, places)
        assert torch.equal(slots, torch.where(places >= 0, places + 2, -1))
        return places.sort(-1).values.long()

    assert torch.equal(choose(queries), want.sort(-1).values)
    assert not torch.equal(choose(-queries), want.sort(-1).values)
    with pytest.raises(TypeError, match="float8"):
        choose(queries.to(torch.float8_e4m3fn))


def test_token_requests() -> None:
    out = torch.full((8,), 9, dtype=torch.int32)
    assert metadata.token_requests(torch.tensor([0, 3, 3, 5, 5]), out, 5, 7).tolist() == [0, 0, 0, 2, 2, 0, 0]
    assert out[7] == 9


def test_compressed_slots_belong_to_the_token_that_closes_a_window() -> None:
    out = torch.full((8,), 77)
    slots = torch.tensor([5, 6, 7, 8, 9, 10, -1, 12])
    table = torch.tensor([[3, 4], [5, 6]])
    # The first request goes on at position 6, the second is new; one of its tokens is cached already.
    metadata.compressed_slots(out, slots, torch.tensor([0, 3, 8]), torch.tensor([9, 5]), table, 1, RATIO, 1, 1)
    assert out.tolist() == [-1, 4, -1, -1, -1, -1, -1, -1]
    slots[6] = 11
    metadata.compressed_slots(out, slots, torch.tensor([0, 3, 8]), torch.tensor([9, 5]), table, 1, RATIO, 1, 1)
    assert out.tolist() == [-1, 4, -1, -1, -1, -1, 5, -1]


def test_an_existing_op_is_left_alone() -> None:
    from interp_deepseek_v4.kernels import registry

    def matmul(a: torch.Tensor) -> torch.Tensor:
        raise AssertionError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "NAMESPACE", "aten")
        assert compiled("matmul")
        registry.register([Kernel(matmul)])
        assert not registry._REGISTERED.intersection({"matmul"})
    assert_close(torch.ops.aten.matmul(torch.eye(2), torch.ones(2)), torch.ones(2))


def test_each_query_looks_at_the_entries_before_it() -> None:
    begins, ends, owners = (torch.full((size,), 77, dtype=torch.int32) for size in (9, 9, 2))
    # The first request goes on at position 4 and has two entries; the second is too short for one.
    starts_of_queries, lengths, entries = torch.tensor([0, 6, 9]), torch.tensor([10, 3]), torch.tensor([0, 2, 2])
    metadata.prefill_chunk(
        starts_of_queries, lengths, entries, entries, owners, begins, ends, 0, 9, 0, 1, 1, num_reqs=2, COMPRESS_RATIO=4
    )
    assert (begins.tolist(), ends.tolist(), owners.tolist()) == ([0] * 6 + [1] * 3, [1, 1, 1, 2, 2, 2, 1, 1, 1], [0, 0])
    # vLLM's way from a start to a request must end at a request.
    assert int((torch.searchsorted(entries, begins, right=True) - 1).max()) < 2
