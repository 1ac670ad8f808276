"""A network in memory: several models around it, callers of its own in other threads, and what is done to it later."""

from __future__ import annotations

from threading import Thread
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from interp_core import Add, Apply, RequestError, load_model, run_with_cache, sweep

TOKENS = [[5, 9, 11, 5, 77]]
FAR = Add("resid_post.1", torch.full((32,), 3.0))


@pytest.fixture(scope="module")
def network() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=101, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4
    )
    return LlamaForCausalLM(config).eval()


def beside(work: Any) -> tuple[Apply, list[Any], list[Thread]]:
    """An operation in whose middle another thread begins ``work``; what that gave, and the thread."""
    given: list[Any] = []
    threads: list[Thread] = []

    def operation(rows: torch.Tensor) -> torch.Tensor:
        if not threads:
            threads.append(Thread(target=lambda: given.append(work())))
            threads[0].start()
            threads[0].join(timeout=0.5)
        return rows

    return Apply("resid_post.0", operation), given, threads


def test_a_direct_call_in_another_thread_is_left_alone(network: Any) -> None:
    with torch.no_grad():
        plain = network(torch.tensor(TOKENS)).logits
    wrapped = load_model(network)
    alone = run_with_cache(wrapped, TOKENS, ["z.*", "resid_post.2", "lm_head"], steering=[FAR])

    def call() -> Any:
        with torch.no_grad():
            return network(torch.tensor(TOKENS * 2)).logits

    operation, given, threads = beside(call)
    found = run_with_cache(wrapped, TOKENS, ["z.*", "resid_post.2", "lm_head"], steering=[operation, FAR])
    threads[0].join()
    torch.testing.assert_close(given[0], plain.expand(2, -1, -1), rtol=0, atol=1e-6)
    assert not torch.allclose(alone["lm_head"], plain, atol=1e-2), "the control: what is steered differs"
    for address, rows in alone.items():
        torch.testing.assert_close(found[address], rows, rtol=0, atol=0)


def test_models_around_one_network_take_turns(network: Any) -> None:
    first, second = load_model(network), load_model(network)
    plain = run_with_cache(second, TOKENS, ["lm_head"])["lm_head"]
    steered = run_with_cache(first, TOKENS, ["lm_head"], steering=[FAR])["lm_head"]
    operation, given, threads = beside(lambda: run_with_cache(second, TOKENS, ["lm_head"])["lm_head"])
    found = run_with_cache(first, TOKENS, ["lm_head"], steering=[operation, FAR])["lm_head"]
    threads[0].join()
    assert torch.equal(found, steered)
    assert torch.equal(given[0], plain)
    assert not torch.equal(found, given[0])


def test_a_network_that_is_set_to_training_later_is_refused() -> None:
    network = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=32, n_head=4, vocab_size=101, n_positions=64)).eval()
    model = load_model(network)
    before = run_with_cache(model, TOKENS, ["resid_post.1"])["resid_post.1"]
    network.train()
    with pytest.raises(RequestError, match=r"model\.eval"):
        run_with_cache(model, TOKENS, ["resid_post.1"])
    network.eval()
    assert torch.equal(run_with_cache(model, TOKENS, ["resid_post.1"])["resid_post.1"], before)


def test_a_sweep_over_heads_takes_the_vector_of_the_whole_point(network: Any) -> None:
    model = load_model(network)
    mean = run_with_cache(model, TOKENS[0], ["z.1"])["z.1"].mean((0, 1))
    whole = sweep(model, TOKENS[0], ["z.1"], 7, put={"z.1": mean}, each="head", positions="last")
    single = {f"z.1.head-{h}": mean[h] for h in range(4)}
    assert torch.equal(
        whole.values, sweep(model, TOKENS[0], ["z.1"], 7, put=single, each="head", positions="last").values
    )
    assert not torch.equal(whole.values, sweep(model, TOKENS[0], ["z.1"], 7, each="head", positions="last").values)
    with pytest.raises(RequestError, match=r"put=\{"):
        sweep(model, TOKENS[0], ["z.1"], 7, put=mean)
    with pytest.raises(RequestError, match="axes are"):
        sweep(model, TOKENS[0], ["z.1"], 7, put={"z.1": mean[:2]}, each="head")
