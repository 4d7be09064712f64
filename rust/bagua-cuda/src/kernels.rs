//! The list of kernels, and how each is launched. Their sources are `kernels/*.cu`, one program per file.
//!
//! Every kernel has blocks of [`THREADS`] threads and loops over its work, so the grid only affects the speed. The
//! exceptions are the kernels of [`Encode`], which share a grid, and of [`Mean`]. Numbers of elements are u64,
//! addresses have 8 bytes. Elements are aligned to their size, records to 1 byte and ranges to 4 (those of
//! `convert_reduce_T_U` to 16).
//!
//! | kernel | parameters |
//! |---|---|
//! | `minmax_u8_range_T` | elements, count per chunk, chunks, ranges |
//! | `minmax_u8_encode_T` | elements, count per chunk, chunks, ranges, records, nonfinite (u32, or null) |
//! | `minmax_u8_decode_T` | records, count per chunk, chunks, tiles of a chunk, elements |
//! | `minmax_u8_tables_T` | records, count, tables |
//! | `minmax_u8_reduce_range_T` | records, count, ranks (u32), divisor (f32), tables, ranges |
//! | `minmax_u8_reduce_T` | as `reduce_range`, then: record, mean (or null), nonfinite (or null) |
//! | `convert_T_U` | elements, their step, converted, their step, count per chunk, chunks |
//! | `convert_reduce_T_U` | records of U, bytes of each, count, ranks (u32), divisor (f32), record |
//! | `update_correct_T` | weights, average, snapshot, count |
//! | `update_ring_difference_T` | weights, left, right, own, out, count |
//! | `update_ring_take_T` | replica, difference, count |
//! | `feedback_add_T` | data, error, error afterwards, count |
//! | `feedback_lose_T` | error, decoded, count |
//! | `feedback_lose_mean_T` | error, mean, decoded, count, divisor (f32) |
//! | `feedback_look_T` | data, count, nonfinite |
//! | `feedback_keep_f32` | error, error afterwards, count, nonfinite |
//! | `average_T` | eight addresses (a struct), number of them (u32), out, count, divisor (f64) |

use bagua_core::types::DType;

/// Number of threads in a block of every kernel.
pub const THREADS: u32 = 256;
/// Maximum number of sources in one launch of `average_T`.
pub const MAX_SOURCES: usize = 8;
/// Size of a range in bytes: smallest, largest, a flag that is set if none is NaN, and an unused word.
pub const RANGE: usize = 16;
/// Size in bytes of a rank's table, in memory and in a block's shared memory.
pub const TABLE: usize = 1024;
/// Maximum number of ranks whose tables are put in shared memory.
pub const MAX_SHARED_TABLES: u32 = 32;

/// A file of kernels, which are compiled together.
#[derive(Clone, Copy, Debug)]
pub struct Program {
    /// Name of the file without its extension.
    pub name: &'static str,
    /// The file's text.
    pub source: &'static str,
    /// Names of the file's kernels.
    pub kernels: &'static [&'static str],
}

/// Declares the programs by the names of their files, and the kernels in them. A kernel's name is a beginning and an
/// ending joined by an underscore.
macro_rules! programs {
    ($($program:literal { $($beginning:literal: $($ending:literal)*;)* })*) => {
        /// All programs.
        pub const PROGRAMS: [Program; [$($program),*].len()] = [$(
            Program {
                name: $program,
                source: include_str!(concat!("../kernels/", $program, ".cu")),
                kernels: &[$($(concat!($beginning, "_", $ending),)*)*],
            },
        )*];
    };
}

programs! {
    "minmax_u8" {
        "minmax_u8_range": "f32" "f16" "bf16";
        "minmax_u8_encode": "f32" "f16" "bf16";
        "minmax_u8_decode": "f32" "f16" "bf16";
    }
    "minmax_u8_reduce" {
        "minmax_u8_tables": "f32" "f16" "bf16";
        "minmax_u8_reduce_range": "f32" "f16" "bf16";
        "minmax_u8_reduce": "f32" "f16" "bf16";
    }
    "convert" {
        "convert_f32": "f16" "bf16";
        "convert_f16": "f32" "f16" "bf16";
        "convert_bf16": "f32" "f16" "bf16";
    }
    "convert_reduce" {
        "convert_reduce_f32": "f16" "bf16";
        "convert_reduce_f16": "f16" "bf16";
        "convert_reduce_bf16": "f16" "bf16";
    }
    "update" {
        "update_correct": "f16" "bf16" "f32" "f64";
        "update_ring_difference": "f16" "bf16" "f32";
        "update_ring_take": "f16" "bf16" "f32";
    }
    "feedback" {
        "feedback_add": "f16" "bf16" "f32";
        "feedback_lose": "f16" "bf16" "f32";
        "feedback_lose_mean": "f16" "bf16" "f32";
        "feedback_look": "f16" "bf16" "f32";
        "feedback_keep": "f32";
    }
    "average" {
        "average": "f16" "bf16" "f32" "f64";
    }
}

/// Returns the program that contains the kernel with that name.
pub fn program_of(kernel: &str) -> Option<&'static Program> {
    PROGRAMS.iter().find(|program| program.kernels.contains(&kernel))
}

/// Returns the name of an element type in the names of kernels.
pub const fn short_name(dtype: DType) -> &'static str {
    match dtype {
        DType::F16 => "f16",
        DType::BF16 => "bf16",
        DType::F32 => "f32",
        DType::F64 => "f64",
        DType::U8 => "u8",
        DType::I8 => "i8",
        DType::U16 => "u16",
        DType::I16 => "i16",
        DType::U32 => "u32",
        DType::I32 => "i32",
        DType::U64 => "u64",
        DType::I64 => "i64",
        DType::Bool => "bool",
        DType::C64 => "c64",
        DType::C128 => "c128",
    }
}

/// Returns the kernel that averages elements of a type, and the size of its elements in bytes. Complex numbers are two
/// floats. Panics if the type has no average.
pub fn average_of(dtype: DType) -> (&'static str, usize) {
    match dtype {
        DType::F16 => ("average_f16", 2),
        DType::BF16 => ("average_bf16", 2),
        DType::F32 | DType::C64 => ("average_f32", 4),
        DType::F64 | DType::C128 => ("average_f64", 8),
        other => panic!("averages of {} should have been refused", other.name()),
    }
}

/// The size of a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grid {
    /// Number of blocks in each dimension.
    pub blocks: [u32; 3],
    /// Dynamic shared memory of a block in bytes.
    pub shared: u32,
}

/// Number of blocks of 256 threads that a multiprocessor holds, enough to keep its memory accesses in flight.
const PER_PROCESSOR: u64 = 8;

/// Returns the number of blocks for independent pieces of 16 bytes. A thread has at least `each` of them.
fn blocks(pieces: u64, each: u64, processors: u32) -> u32 {
    at_most(pieces, each, u64::from(processors) * PER_PROCESSOR)
}

fn at_most(pieces: u64, each: u64, most: u64) -> u32 {
    let wanted = pieces.div_ceil(u64::from(THREADS) * each);
    let most = most.clamp(1, u64::from(MAX_BLOCKS));
    u32::try_from(wanted.clamp(1, most)).expect("at most MAX_BLOCKS")
}

/// Maximum number of blocks of a chunk, because each of them reads the ranges of all.
const MAX_BLOCKS: u32 = 2048;

impl Grid {
    /// Returns the grid of `convert_reduce`, `update`, `feedback` or `average_T`, for the size of the largest array.
    pub fn of_bytes(bytes: u64, processors: u32) -> Grid {
        Grid { blocks: [blocks(bytes.div_ceil(16), 2, processors), 1, 1], shared: 0 }
    }

    /// Returns the grid of `convert_T_U`, if a chunk has `bytes` bytes in the larger of its arrays.
    pub fn convert(bytes: u64, chunks: u64, processors: u32) -> Grid {
        let rows = rows(chunks);
        let share = (u64::from(processors) * PER_PROCESSOR).div_ceil(u64::from(rows) * PER_PROCESSOR);
        let columns = blocks(bytes.div_ceil(16), 2, u32::try_from(share).unwrap_or(u32::MAX));
        Grid { blocks: [columns, rows, 1], shared: 0 }
    }
}

/// Returns the second dimension of a grid whose rows of blocks each work on one or several chunks.
fn rows(chunks: u64) -> u32 {
    u32::try_from(chunks).unwrap_or(u32::MAX).clamp(1, MAX_ROWS)
}

/// Maximum of a grid's second dimension.
const MAX_ROWS: u32 = 65_535;

/// The two launches that encode chunks: `minmax_u8_range_T`, then `minmax_u8_encode_T` with the same grid.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Encode {
    /// Grid of both launches.
    pub grid: Grid,
    /// Size in bytes of the ranges between the launches.
    pub ranges: usize,
}

impl Encode {
    /// Returns the launches for chunks of `count` elements.
    pub fn new(dtype: DType, count: u64, chunks: u64, processors: u32) -> Encode {
        // The number of blocks of a chunk that run at the same time: `ENCODERS` in the source.
        let most = u64::from(processors) * 6;
        let columns = at_most((count * dtype.size() as u64).div_ceil(16), 16, most);
        let ranges = usize::try_from(chunks * u64::from(columns)).expect("a device's memory") * RANGE;
        Encode { grid: Grid { blocks: [columns, rows(chunks), 1], shared: 0 }, ranges }
    }
}

/// The launch of `minmax_u8_decode_T`, whose blocks share chunks tile by tile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Decode {
    /// Number of tiles per chunk.
    pub tiles: u64,
    /// Grid of the launch.
    pub grid: Grid,
}

/// Number of 16-byte vectors in a thread's part of a tile.
const VECTORS: u64 = 4;

impl Decode {
    /// Returns the launch for chunks of `count` elements.
    pub fn new(dtype: DType, count: u64, chunks: u64, processors: u32) -> Decode {
        let tiles = (count * dtype.size() as u64).div_ceil(16 * VECTORS * u64::from(THREADS)).max(1);
        let most = u64::from(processors) * PER_PROCESSOR;
        let columns = u32::try_from((tiles * chunks).clamp(1, most)).expect("processors times 8");
        Decode { tiles, grid: Grid { blocks: [columns, 1, 1], shared: 0 } }
    }
}

/// The launches of `minmax_u8_tables_T`, `minmax_u8_reduce_range_T` and `minmax_u8_reduce_T`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mean {
    /// Grid of the first launch: one block for each rank.
    pub tables: Grid,
    /// Grid of the other two launches.
    pub grid: Grid,
    /// Size of all tables in bytes.
    pub tables_bytes: usize,
    /// Size of the ranges in bytes.
    pub ranges: usize,
}

impl Mean {
    /// Returns the launches for the records of `ranks` ranks with `count` elements each.
    pub fn new(count: u64, ranks: u32, processors: u32) -> Mean {
        let columns = blocks(count.div_ceil(8), 4, processors);
        let shared = if ranks <= MAX_SHARED_TABLES { ranks * TABLE as u32 } else { 0 };
        Mean {
            tables: Grid { blocks: [ranks, 1, 1], shared: 0 },
            grid: Grid { blocks: [columns, 1, 1], shared },
            tables_bytes: ranks as usize * TABLE,
            ranges: columns as usize * RANGE,
        }
    }
}

#[cfg(test)]
mod tests {
    use bagua_core::types::ReduceOp;

    use super::*;

    #[test]
    fn every_type_that_has_an_average_has_a_kernel() {
        for dtype in DType::ALL.into_iter().filter(|dtype| ReduceOp::Avg.check(*dtype).is_ok()) {
            let (kernel, unit) = average_of(dtype);
            assert!(program_of(kernel).is_some() && dtype.size().is_multiple_of(unit), "{}", dtype.name());
        }
    }

    #[test]
    fn names_of_kernels_are_unique() {
        let mut names: Vec<_> = PROGRAMS.iter().flat_map(|program| program.kernels).collect();
        let all = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), all);
    }

    #[test]
    fn the_sources_have_the_same_numbers() {
        let device = include_str!("../kernels/device.cuh");
        assert!(device.contains(&format!("#define THREADS {THREADS}\n")));
        let elementwise = include_str!("../kernels/elementwise.cuh");
        assert!(elementwise.contains(&format!("#define MAX_SOURCES {MAX_SOURCES}\n")));
        assert!(PROGRAMS[0].source.contains(&format!("#define VECTORS {VECTORS}\n")));
        assert!(PROGRAMS[0].source.contains("#define ENCODERS 6\n"));
        assert!(PROGRAMS[1].source.contains(&format!("#define MAX_TABLES {MAX_SHARED_TABLES}\n")));
    }

    #[test]
    fn tiles_cover_a_chunk_and_every_block_has_a_range_of_every_chunk() {
        for (count, chunks) in [(1, 1), (1000, 7), (1 << 20, 64), (4 << 20, 3), (64 << 20, 2), (3, 200_000)] {
            for dtype in [DType::F32, DType::BF16] {
                let bytes = count * dtype.size() as u64;
                let Encode { grid, ranges } = Encode::new(dtype, count, chunks, 132);
                let [columns, rows, one] = grid.blocks;
                assert!(columns > 0 && columns <= MAX_BLOCKS && rows > 0 && rows <= MAX_ROWS && one == 1);
                assert_eq!(ranges as u64, chunks * u64::from(columns) * 16);
                let Decode { tiles, grid } = Decode::new(dtype, count, chunks, 132);
                let of_tile = 16 * VECTORS * u64::from(THREADS);
                assert!(tiles * of_tile >= bytes && (tiles - 1) * of_tile < bytes);
                assert!(grid.blocks[0] > 0 && grid.blocks[0] <= 132 * 8 && grid.blocks[1..] == [1, 1]);
            }
        }
    }

    #[test]
    fn a_large_array_occupies_the_device_and_a_small_one_few_blocks() {
        assert_eq!(Grid::of_bytes(256 << 20, 132).blocks, [1056, 1, 1]);
        assert_eq!(Grid::of_bytes(1, 132).blocks, [1, 1, 1]);
        assert_eq!(Grid::of_bytes(0, 132).blocks, [1, 1, 1]);
        assert_eq!(Decode::new(DType::BF16, 1 << 27, 1, 132).grid.blocks, [1056, 1, 1]);
        assert_eq!(Decode::new(DType::F32, 1 << 12, 10, 132).grid.blocks, [10, 1, 1]);
        assert_eq!(Encode::new(DType::F32, 1 << 22, 16, 132).grid.blocks, [256, 16, 1]);
        assert_eq!(Encode::new(DType::F32, 1 << 26, 1, 132).grid.blocks, [792, 1, 1]);
        assert_eq!(Grid::convert(1 << 18, 1000, 132).blocks, [8, 1000, 1]);
        let mean = Mean::new(1 << 24, 8, 132);
        assert_eq!((mean.grid.blocks, mean.grid.shared, mean.tables.blocks), ([1056, 1, 1], 8192, [8, 1, 1]));
        assert_eq!(Mean::new(1, 40, 132).grid, Grid { blocks: [1, 1, 1], shared: 0 });
    }
}
