"""Reference kernels: DeepSeek-V4 in vLLM's own model code on any CPU, slowly and exactly.

vLLM's DeepSeek-V4 for CPUs calls compiled ops that only its AVX512-BF16 build has and that take no float32, keeps keys
and values in fp8, and prepares its batches with Triton kernels. `install` puts plain torch in the place of what a build
lacks or, where that is asked for, of all of it. Keys and values are then kept as float32 rows beside vLLM's cache
(`store`), so memory for them is about three and a half times what `VLLM_CPU_KVCACHE_SPACE` says once all blocks have
been used.
"""

from __future__ import annotations

__all__ = ["install", "needed"]


def needed() -> list[str]:
    """The compiled ops of DeepSeek-V4 that this build of vLLM lacks; empty on one that has them all."""
    from interp_deepseek_v4.kernels.installation import lacking

    return lacking()


def install(*, replace: bool = False) -> None:
    """Put reference versions in the place of the ops that lack, in this process; with ``replace``, of all of them.

    Compiled ops take no float32, and round keys and heads to fewer bits.

    For vLLM's worker process, before the model is loaded. Calling it again changes nothing. Raises `RuntimeError` on
    a build that has some of the ops that share the key/value cache and lacks others.
    """
    from interp_deepseek_v4.kernels.installation import put_in_place

    put_in_place(replace=replace)
