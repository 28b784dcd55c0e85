"""Start-up of the sandbox's server: leaves the trainer's namespaces, imports libraries, restricts the file system."""

import os
import sys

import linux
import seccomp
import view
import worker

NAMESPACES = {
    "pid": linux.CLONE_NEWPID,
    "net": linux.CLONE_NEWNET,
    "ipc": linux.CLONE_NEWIPC,
    "uts": linux.CLONE_NEWUTS,
    "mount": linux.CLONE_NEWNS,
}


def isolate(wanted: list[str]) -> tuple[list[str], dict[str, str]]:
    """Move this process out of the trainer's namespaces, one by one. Returns the names of the namespaces that it has
    left, and reasons for the others."""
    done, failures = [], {}
    if "namespaces" not in wanted:
        return done, {"namespaces": "not wanted"}
    try:
        linux.unshare(linux.CLONE_NEWNS)  # twice does no harm; this asks whether the rights are there
    except OSError:
        try:
            ids = os.getuid(), os.getgid()
            linux.unshare(linux.CLONE_NEWUSER)
            maps = {"setgroups": "deny", "uid_map": f"0 {ids[0]} 1", "gid_map": f"0 {ids[1]} 1"}
            for name, text in maps.items():
                with open(f"/proc/self/{name}", "w") as file:
                    file.write(text)
            done.append("user")
        except OSError as error:
            failures["user"] = str(error)
    for name, flag in NAMESPACES.items():
        try:
            linux.unshare(flag)
            done.append(name)
        except OSError as error:
            failures[name] = str(error)
    return done, failures


def takes_uid(uid: int) -> bool:
    """Return whether sandboxed programs can run as user ``uid``: this process may change its user (root may, except
    in most user namespaces), and that user can read the standard library."""
    pid = os.fork()
    if not pid:
        try:
            os.setgroups([])
            os.setresuid(uid, uid, uid)
            open(os.path.join(view.STDLIB, "abc.py")).close()
        except OSError:
            os._exit(1)
        os._exit(0)
    return os.waitpid(pid, 0)[1] == 0


def arrange(options: dict, mechanisms: list[str], failures: dict[str, str]) -> worker.Confinement:
    """Prepare the sandbox's server before it forks programs: load the standard library and restrict the file system.
    Returns the settings by which each program then confines itself."""
    wanted, paths = options["mechanisms"], options["paths"]
    sys.path += options["search"]
    view.preload(options["packages"])
    shown, rules = "none", -1
    if "mount" in mechanisms:
        try:
            view.mounted(options["stage"], paths)
            shown = "mounts"
        except OSError as error:
            failures["mounts"] = str(error)
    if shown == "none" and "landlock" in wanted:
        try:
            rules, shown = view.ruled(paths), "landlock"
        except OSError as error:
            failures["landlock"] = str(error)
    filtering = "seccomp" in wanted and seccomp.available()
    if not filtering:
        failures["seccomp"] = "not wanted" if "seccomp" not in wanted else "not offered by the kernel, or not x86-64"
    mechanisms += [name for name, there in ((shown, shown != "none"), ("seccomp", filtering)) if there]
    limits = {key: options[key] for key in ("memory_mb", "disk_mb", "threads", "cpu_s")}
    # Random, because trainers in other containers have the same process ids, and the kernel counts per user in all.
    first = 1_000_000_000 + int.from_bytes(os.urandom(8), "little") % 3_000_000_000
    return worker.Confinement(shown, rules, filtering, takes_uid(first), first, **limits)
