"""``peerlane serve``: judge for others, over HTTP."""

from pathlib import Path
from typing import Annotated, cast

import typer

from peerlane.cli.evaluation import ISOLATION_HELP, RANKS_PER_GPU_HELP, Tier, choose_device, default_world_sizes, parse_ranks_per_gpu
from peerlane.cli.options import ProblemFolders, one_of
from peerlane.common.place import Place


def serve(
    host: Annotated[str, typer.Option(help="Address to listen on; beyond loopback only with a token.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")] = 8300,
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Of queue and results, on a local disk.")] = Path("peerlane-service"),
    problems_folders: ProblemFolders = None,
    world_size: Annotated[int | None, typer.Option(min=1, help="Number of ranks; by default 4, or what the GPUs allow.")] = None,
    device: Annotated[str, typer.Option(help="auto, cuda, cpu, or emulated: kernels of the device kit, without a GPU.")] = "auto",
    ranks_per_gpu: Annotated[str, typer.Option(metavar="NUMBER", help=RANKS_PER_GPU_HELP)] = "auto",
    isolation: Annotated[str | None, typer.Option(help=ISOLATION_HELP)] = None,
    token_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A line per token: NAME TOKEN. Beside PEERLANE_TOKEN, which holds one.")
    ] = None,
    queue_limit: Annotated[int, typer.Option(help="Jobs that may wait; more are refused for now.")] = 256,
    share: Annotated[float, typer.Option(help="Part of the queue that one of several tokens may fill.")] = 0.5,
    drain: Annotated[float, typer.Option(metavar="SECONDS", help="For the running evaluation after SIGTERM; then it is put back.")] = 120.0,
    judges: Annotated[
        int | None,
        typer.Option(help="Candidates judged side by side where nothing is timed; by default 1 on GPUs, elsewhere as many as cores allow."),
    ] = None,
    check: Annotated[bool, typer.Option("--check/--no-check", help="Check the node before it takes work.")] = True,
) -> None:
    """Judge candidates that arrive over HTTP. Accepted jobs survive the end of the service.

    Exit codes: 0 after SIGTERM or an interrupt; 2 the request cannot be carried out.
    """
    from peerlane.service.server import require_serve_extra

    require_serve_extra()
    from peerlane.sandbox.hidden_files import keep_from_candidates
    from peerlane.service.server import listen
    from peerlane.service.server import serve as run
    from peerlane.service.settings import ServiceSettings, read_tokens
    from peerlane.settings import forget_service_token, service_token, service_token_file

    tokens = read_tokens(service_token(), token_file)
    forget_service_token()
    for file in (token_file, service_token_file()):
        if file is not None:
            keep_from_candidates(file)
    judged_on = choose_device(device, emulated=True)
    gpus = []
    if Place.of(judged_on).has_gpus:
        from peerlane.hardware.topology import discover

        gpus = [gpu.uuid for gpu in discover().gpus]
    tier = None if isolation is None else cast(Tier, one_of(isolation, ("L0", "L1", "L2"), "--isolation"))
    ranks = world_size or max(default_world_sizes(judged_on))
    settings = ServiceSettings(out, ranks, judged_on, tier, parse_ranks_per_gpu(ranks_per_gpu), queue_limit, share, drain, check, judges)
    run(settings, tokens, listen(host, port, tokens), gpus)
