"""Started by test_rank_watch.py: the watch of one of three ranks, alone. ``store_watch_worker.py RANK FOLDER``; rank 0
holds the store."""

import socket
import sys
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).parents[3]))

from torch.distributed import TCPStore

from callbacks.training.rank_watch import RankWatch, _Watch

if __name__ == "__main__":
    rank, folder = int(sys.argv[1]), Path(sys.argv[2])
    socket.gethostname = lambda: f"h{rank}"
    options = {"wait_for_workers": False, "timeout": timedelta(seconds=300)}
    if rank == 0:
        store = TCPStore("127.0.0.1", 0, is_master=True, **options)
        (folder / "port.new").write_text(str(store.port))
        (folder / "port.new").rename(folder / "port")
    while not (folder / "port").exists():
        time.sleep(0.1)
    if rank > 0:
        store = TCPStore("127.0.0.1", int((folder / "port").read_text()), is_master=False, **options)
    loop = SimpleNamespace(total_batch_idx=0)
    trainer = SimpleNamespace(global_rank=rank, world_size=3, fit_loop=loop, default_root_dir=str(folder))
    _Watch(RankWatch(dead_after_s=15.0), store, trainer).start()
    (folder / f"watching{rank}").touch()
    time.sleep(300)
