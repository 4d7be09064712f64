//! Handles, numbers and structures of NCCL's interface, by their C names.
//!
//! C enumerations are integers here, because a library that is newer than this file may return an unlisted number.

#![allow(non_camel_case_types)]

use std::ffi::{c_char, c_int, c_uint, c_void};
use std::ptr;

/// Bytes of an [`ncclUniqueId`].
pub const UNIQUE_ID_BYTES: usize = 128;

/// Value of an unset field of [`ncclConfig_t`] (`NCCL_CONFIG_UNDEF_INT`). NCCL then chooses.
pub const UNDEFINED: c_int = c_int::MIN;

/// The number by which NCCL recognises an initialised [`ncclConfig_t`] (`NCCL_API_MAGIC`).
pub const MAGIC: c_uint = 0xcafe_beef;

/// Number of NCCL 2.19.0, as `ncclGetVersion` returns it: the oldest supported version, and the one whose
/// fields [`ncclConfig_t`] has.
pub const OLDEST_VERSION: c_int = 21900;

/// Target of an [`ncclComm_t`]. Only NCCL knows its contents.
#[repr(C)]
pub struct ncclComm {
    /// Placeholder that gives the type no public fields.
    opaque: [u8; 0],
}

/// A communicator: one rank of a group.
pub type ncclComm_t = *mut ncclComm;

/// A stream of the CUDA runtime, which is a stream of the driver.
pub type cudaStream_t = *mut c_void;

/// Identifier of a new communicator. Rank 0 creates it, and passes it to all ranks.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ncclUniqueId {
    /// Bytes that only NCCL reads.
    pub internal: [c_char; UNIQUE_ID_BYTES],
}

/// Result of a call.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ncclResult_t(pub c_int);

impl ncclResult_t {
    /// `ncclSuccess`.
    pub const SUCCESS: Self = Self(0);
    /// `ncclUnhandledCudaError`: a call of CUDA failed.
    pub const UNHANDLED_CUDA_ERROR: Self = Self(1);
    /// `ncclSystemError`: a call of the operating system failed.
    pub const SYSTEM_ERROR: Self = Self(2);
    /// `ncclInternalError`: a mistake in NCCL, or damaged memory.
    pub const INTERNAL_ERROR: Self = Self(3);
    /// `ncclInvalidArgument`: an argument cannot be used.
    pub const INVALID_ARGUMENT: Self = Self(4);
    /// `ncclInvalidUsage`: the call is not allowed here.
    pub const INVALID_USAGE: Self = Self(5);
    /// `ncclRemoteError`: another rank failed, or the connection to it.
    pub const REMOTE_ERROR: Self = Self(6);
    /// `ncclInProgress`: the work of a non-blocking communicator has not been enqueued yet.
    pub const IN_PROGRESS: Self = Self(7);

    /// Returns the name in NCCL's header, or "ncclResult_t" for a number that is not listed here.
    pub fn name(self) -> &'static str {
        match self {
            Self::SUCCESS => "ncclSuccess",
            Self::UNHANDLED_CUDA_ERROR => "ncclUnhandledCudaError",
            Self::SYSTEM_ERROR => "ncclSystemError",
            Self::INTERNAL_ERROR => "ncclInternalError",
            Self::INVALID_ARGUMENT => "ncclInvalidArgument",
            Self::INVALID_USAGE => "ncclInvalidUsage",
            Self::REMOTE_ERROR => "ncclRemoteError",
            Self::IN_PROGRESS => "ncclInProgress",
            _ => "ncclResult_t",
        }
    }
}

/// Type of elements.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ncclDataType_t(pub c_int);

impl ncclDataType_t {
    /// `ncclInt8`.
    pub const INT8: Self = Self(0);
    /// `ncclUint8`.
    pub const UINT8: Self = Self(1);
    /// `ncclInt32`.
    pub const INT32: Self = Self(2);
    /// `ncclUint32`.
    pub const UINT32: Self = Self(3);
    /// `ncclInt64`.
    pub const INT64: Self = Self(4);
    /// `ncclUint64`.
    pub const UINT64: Self = Self(5);
    /// `ncclFloat16`.
    pub const FLOAT16: Self = Self(6);
    /// `ncclFloat32`.
    pub const FLOAT32: Self = Self(7);
    /// `ncclFloat64`.
    pub const FLOAT64: Self = Self(8);
    /// `ncclBfloat16`.
    pub const BFLOAT16: Self = Self(9);
}

/// Reduction operation.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ncclRedOp_t(pub c_int);

impl ncclRedOp_t {
    /// `ncclSum`.
    pub const SUM: Self = Self(0);
    /// `ncclProd`.
    pub const PRODUCT: Self = Self(1);
    /// `ncclMax`.
    pub const MAX: Self = Self(2);
    /// `ncclMin`.
    pub const MIN: Self = Self(3);
    /// `ncclAvg`.
    pub const AVERAGE: Self = Self(4);
}

/// Options of a new communicator: the fields of NCCL 2.19, with which the structure of every later version begins. A
/// later library learns from `size` and `version` that the newer fields are missing.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ncclConfig_t {
    /// Bytes of this structure.
    pub size: usize,
    /// [`MAGIC`].
    pub magic: c_uint,
    /// The NCCL version whose fields the structure has, as `ncclGetVersion` returns it.
    pub version: c_uint,
    /// 1 if calls wait. With 0 they may return before their work is done or enqueued, and `ncclCommGetAsyncError`
    /// reports when it is.
    pub blocking: c_int,
    /// Thread blocks per cluster, 0 to 8.
    pub cga_cluster_size: c_int,
    /// Fewest thread blocks of a kernel.
    pub min_ctas: c_int,
    /// Most thread blocks of a kernel.
    pub max_ctas: c_int,
    /// NUL-terminated name of the network module; null: NCCL chooses.
    pub net_name: *const c_char,
    /// 1: communicators that are split off share resources with this one.
    pub split_share: c_int,
}

impl ncclConfig_t {
    /// Returns a configuration that sets `blocking` and leaves everything else to NCCL.
    pub fn new(blocking: bool) -> ncclConfig_t {
        ncclConfig_t {
            size: size_of::<ncclConfig_t>(),
            magic: MAGIC,
            version: OLDEST_VERSION as c_uint,
            blocking: blocking.into(),
            cga_cluster_size: UNDEFINED,
            min_ctas: UNDEFINED,
            max_ctas: UNDEFINED,
            net_name: ptr::null(),
            split_share: UNDEFINED,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::mem::offset_of;

    use super::*;

    #[test]
    fn the_configuration_has_the_layout_of_2_19() {
        let offsets = [
            offset_of!(ncclConfig_t, size),
            offset_of!(ncclConfig_t, magic),
            offset_of!(ncclConfig_t, version),
            offset_of!(ncclConfig_t, blocking),
            offset_of!(ncclConfig_t, cga_cluster_size),
            offset_of!(ncclConfig_t, min_ctas),
            offset_of!(ncclConfig_t, max_ctas),
            offset_of!(ncclConfig_t, net_name),
            offset_of!(ncclConfig_t, split_share),
        ];
        assert_eq!(offsets, [0, 8, 12, 16, 20, 24, 28, 32, 40]);
        assert_eq!(size_of::<ncclConfig_t>(), 48);
    }

    #[test]
    fn a_new_configuration_says_its_own_size_and_leaves_the_rest_to_nccl() {
        let config = ncclConfig_t::new(false);
        assert_eq!((config.size, config.magic, config.version), (48, 0xcafe_beef, 21900));
        assert_eq!((config.blocking, config.min_ctas, config.split_share), (0, i32::MIN, i32::MIN));
        assert!(config.net_name.is_null());
    }

    #[test]
    fn an_id_is_128_bytes_and_numbers_are_as_wide_as_an_int() {
        assert_eq!(size_of::<ncclUniqueId>(), 128);
        let sizes = [size_of::<ncclResult_t>(), size_of::<ncclDataType_t>(), size_of::<ncclRedOp_t>()];
        assert_eq!(sizes, [size_of::<c_int>(); 3]);
    }
}
