"""The kernel database's tables, and the ways from earlier versions of them."""

from __future__ import annotations

SCHEMA_VERSION = 5
LAUNCH_KEY = "launch-overhead"
"""In place of a kernel: what launching one takes. No structural hash looks like this."""
REFERENCE_KEY = "reference"
"""Likewise: what the reference kernel takes at the machine's usual speed, to which the kernels' times are reckoned."""
ONCE_VERSION = "2"
"""Of both."""
_CREATE_MEASUREMENT = """
CREATE TABLE measurement (
    kernel      TEXT NOT NULL,   -- structural hash of the kernel, "/", its operands' temperatures; or a reserved name
    target      TEXT NOT NULL,   -- target_key()
    version     TEXT NOT NULL,   -- of the pipeline that schedules the kernel
    run_secs    REAL,
    error       TEXT,
    error_kind  TEXT,
    repeats     INTEGER NOT NULL,
    spread      REAL,
    measured_at REAL NOT NULL,   -- seconds since 1970
    tvm_version TEXT NOT NULL,
    slowdown    REAL,            -- of the machine meanwhile, see Measurement; NULL: not known
    confirmed   INTEGER NOT NULL DEFAULT 0,  -- 1: run_secs is a second measurement's, see Measurement
    PRIMARY KEY (kernel, target, version),
    CHECK ((run_secs IS NULL) <> (error IS NULL))
) WITHOUT ROWID
"""
TAKE_PLACE = """
ON CONFLICT (kernel, target, version) DO UPDATE SET
    run_secs = excluded.run_secs, error = excluded.error, error_kind = excluded.error_kind,
    repeats = excluded.repeats, spread = excluded.spread, measured_at = excluded.measured_at,
    tvm_version = excluded.tvm_version, slowdown = excluded.slowdown, confirmed = excluded.confirmed
"""
"""Of a statement that inserts into `measurement`: a new row takes the place of the one there. A condition follows."""
_ADD_SLOWDOWN = "ALTER TABLE measurement ADD COLUMN slowdown REAL"
_ADD_CONFIRMED = "ALTER TABLE measurement ADD COLUMN confirmed INTEGER NOT NULL DEFAULT 0"
STRUCTURE = "substr({0}.kernel, 1, instr({0}.kernel || '/', '/') - 1)"
"""The structural hash in the key of a measurement, the table of this name."""
_CREATE_DESCRIPTION = """
CREATE TABLE description (
    kernel      TEXT NOT NULL,     -- structural hash
    target      TEXT NOT NULL,     -- as above: the features tell of its schedule too
    version     TEXT NOT NULL,
    name        TEXT NOT NULL,     -- the operators fused in it
    features    TEXT NOT NULL,     -- JSON object of numbers, see cost/features.py
    PRIMARY KEY (kernel, target, version)
) WITHOUT ROWID
"""
# Schemas 3 and 4 had one description of a kernel, whatever the target: that of the target measured last.
_DESCRIBE_LAST_TARGET = f"""
INSERT INTO description
SELECT DISTINCT kernel.kernel, m.target, m.version, kernel.name, kernel.features
FROM measurement AS m JOIN kernel ON kernel.kernel = {STRUCTURE.format("m")}
WHERE m.target = (
    SELECT target FROM measurement AS other
    WHERE other.error IS NULL
      AND other.kernel >= kernel.kernel AND other.kernel < kernel.kernel || '0'  -- the character after "/"
    ORDER BY measured_at DESC LIMIT 1
)
"""
_FROM_KERNEL = (_CREATE_DESCRIPTION, _DESCRIBE_LAST_TARGET, "DROP TABLE kernel")
_CREATE_TUNED = """
CREATE TABLE tuned_schedule (
    kernel      TEXT NOT NULL,   -- as above
    target      TEXT NOT NULL,
    version     TEXT NOT NULL,
    trace       TEXT,            -- JSON: the instructions of the best schedule found; NULL where none could be run
    run_secs    REAL,            -- with that schedule
    rule_secs   REAL,            -- with the schedule rules' own, measured in turns with it
    trials      INTEGER NOT NULL,
    tuned_at    REAL NOT NULL,   -- seconds since 1970
    PRIMARY KEY (kernel, target, version)
) WITHOUT ROWID
"""
MIGRATIONS = {
    0: (_CREATE_MEASUREMENT, _CREATE_TUNED, _CREATE_DESCRIPTION),
    1: (_CREATE_TUNED, _ADD_SLOWDOWN, _CREATE_DESCRIPTION, _ADD_CONFIRMED),
    2: (_ADD_SLOWDOWN, _CREATE_DESCRIPTION, _ADD_CONFIRMED),
    3: (_ADD_CONFIRMED, *_FROM_KERNEL),
    4: _FROM_KERNEL,
}
"""What makes a file of this schema version one of the present version; 0 is an empty file."""
