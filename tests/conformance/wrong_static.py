"""Sources of plugins that break one static rule each, and of one that keeps them all."""

from __future__ import annotations

__all__ = ["RIGHT", "WRONG"]

RIGHT = """
from interp_core.architecture import Architecture, Claim
from interp_core.backend import Availability, BackendSpec, OptionSpec
from interp_core.capabilities import Capability
from interp_core.hookspecs import hookimpl
from interp_core.points import PointSpec, hook, unsupported
from interp_core.residual import ResidualBasis

GATE = PointSpec(name="static_gate", scope="layer", axes=["d_mlp"], definition="The gate of the MLP.")


def probe():
    return Availability(True)


def basis(facts):
    return ResidualBasis(lens_valid=False, blockers=["nobody knows"], instead="another trunk")


@hookimpl
def interp_backends():
    return [
        BackendSpec(
            name="static-test",
            summary="A backend.",
            factory="os.path:join",
            probe=probe,
            points={"resid_post": hook(), "z": unsupported("there are no heads")},
            capabilities={"capture", "static-replay"},
            lacks={"steer": "the engine only reads"},
            options=[OptionSpec(name="threads", help="How many.", types=(int,), default=1, choices=(1, 2))],
        )
    ]


@hookimpl
def interp_architectures():
    return [
        Architecture(
            name="static-trunk",
            summary="A trunk.",
            claim=Claim(model_types={"static_trunk"}),
            points=[GATE],
            support={"static-test": {"static_gate": hook(writable=False, why="it is only read")}},
            refused={"resid_mid": "resid_post"},
            residual_basis=basis,
            bindings={"static-test": "interp_core.trunk:Trunk"},
        )
    ]


@hookimpl
def interp_capabilities():
    return [Capability(name="static-replay", what="Replay.", why="Nobody does.", instead="run it again")]
"""


def _with(old: str, new: str) -> str:
    assert old in RIGHT, old
    return RIGHT.replace(old, new)


def _first(lines: str) -> str:
    return f"{lines}\n{RIGHT}"


_UNSTABLE = 'COUNT = []\n\n\n@hookimpl\ndef interp_backends():\n    COUNT.append("the engine only reads")'

_REGISTERS = """
import sys, types
registry = types.ModuleType("transformers.models.auto.configuration_auto")
registry.CONFIG_MAPPING = types.SimpleNamespace(_extra_content={"mine": object})
sys.modules[registry.__name__] = registry
"""
# Where transformers keeps what `AutoConfig.register` adds; that it does is a test of its own.

WRONG: dict[str, list[tuple[str, str]]] = {
    "entry-resolves": [
        (_first("import no_such_module_anywhere"), "No module named 'no_such_module_anywhere'"),
        (_first("raise SystemExit(3)"), "SystemExit: 3"),
        (_first("import os\nos._exit(3)"), "it ended the process (exit status 3)"),
    ],
    "import-light": [
        (_first("import onnxruntime"), "imports onnxruntime"),
        (_with("def probe():", "def probe():\n    import onnxruntime"), "probes imports onnxruntime"),
    ],
    "import-clean": [
        (_first("import os\nos.environ['MINE'] = '1'"), "changes the environment"),
        (_first("import warnings\nwarnings.simplefilter('ignore')"), "changes the filters of warnings"),
        (_first("import logging\nlogging.basicConfig()"), "changes the root logger"),
        (_first("import sys\nsys.path.append('/mine')"), "changes sys.path"),
        (_first("import builtins\nbuiltins.mine = print"), "changes builtins"),
        (_first("open('mine.log', 'w').close()"), "changes the files in the working directory"),
        (
            _first("import threading, time\nthreading.Thread(target=time.sleep, args=(9,), daemon=True).start()"),
            "changes the threads",
        ),
        (_first("print('thank you for choosing mine')"), "it prints"),
        (_first(_REGISTERS), "transformers' registry of configurations (it registers mine)"),
    ],
    "hooks-known": [
        (_with("def interp_architectures", "def interp_architectuers"), "unknown hook 'interp_architectuers'"),
        (_with("def interp_backends()", "def interp_backends(model)"), "interp_backends"),
        ("NOTHING = 1", "implements no hook"),
        (_with("@hookimpl\ndef interp_architectures", "def interp_architectures"), "not a function marked with"),
    ],
    "records-valid": [
        (_with('"os.path:join"', '"os.path.join"'), "not 'package.module:callable'"),
        (_with("return [Capability(", "return [dict("), "a value of type dict where a Capability is due"),
    ],
    "records-stable": [
        (
            _with("@hookimpl\ndef interp_backends():", _UNSTABLE).replace(
                '"the engine only reads"}', "COUNT[0] * len(COUNT)}"
            ),
            "lacks['steer'] differs between two calls",
        )
    ],
    "records-picklable": [(_with("probe=probe", "probe=PROBE") + "\nPROBE = lambda: probe()", "cannot be pickled")],
    "targets-resolve": [
        (_with('"os.path:join"', '"os.path:joni"'), "has no attribute 'joni'"),
        (_with('"os.path:join"', '"os.path:sep"'), "the object cannot be called"),
        (_with('"interp_core.trunk:Trunk"', '"os.path:join"'), "no methods layout and bind"),
    ],
    "names-unique": [
        (_with('name="static-test"', 'name="eager"'), "backend name 'eager'"),
        (_with('"static-replay"', '"capture"').replace('{"capture", "capture"}', '{"capture"}'), "'capture'"),
    ],
    "points-well-formed": [
        (_with('axes=["d_mlp"]', 'axes=["d_mpl"]'), "unknown axis 'd_mpl'"),
        (_with('definition="The gate of the MLP."', 'definition=""'), "no definition"),
        (_with('{"resid_post": hook()', '{"resid_pots": hook()'), "'resid_pots', which is no point"),
    ],
    "capabilities-known": [
        (_with('{"capture", "static-replay"}', '{"captuer"}'), "'captuer', which is no row"),
        (_with('lacks={"steer"', 'lacks={"capture"'), "both serves and lacks 'capture'"),
    ],
    "reasons-given": [
        (_with('unsupported("there are no heads")', 'unsupported("")'), "'z' is not served, and 'why' is empty"),
        (_with('why="it is only read"', 'why=""'), "'static_gate' cannot be written, and 'why' is empty"),
        (_with('{"resid_mid": "resid_post"}', '{"resid_mid": ""}'), "refused['resid_mid'] is empty"),
        (_with('"the engine only reads"', '""'), "lacks['steer'] is empty"),
        (_with('blockers=["nobody knows"]', "blockers=[]"), "'blockers' is empty"),
        (_with('instead="another trunk"', 'instead=""'), "refuses the lens, and 'instead' is empty"),
    ],
    "options-documented": [
        (_with('help="How many."', 'help=""'), "'threads' has no help text"),
        (_with('name="threads"', 'name="dtype"'), "is one that load_model takes everywhere"),
        (_with("default=1", "default=3"), "none of its choices"),
    ],
}
"""Per rule, sources that break it, and a piece of what is said of each."""
