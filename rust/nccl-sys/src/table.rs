//! The functions of one loaded NCCL.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::fmt;
use std::ptr::NonNull;

use crate::types::{cudaStream_t, ncclComm_t, ncclConfig_t, ncclDataType_t, ncclRedOp_t, ncclResult_t, ncclUniqueId};

/// A function that the library does not have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Missing(
    /// The name of its symbol.
    pub &'static CStr,
);

impl fmt::Display for Missing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "has no function {}", self.0.to_string_lossy())
    }
}

impl std::error::Error for Missing {}

/// Declares the table: each function's name in the table, its symbol, and its C signature. Functions of `later`
/// versions of NCCL may be missing from a library.
macro_rules! table {
    (
        required { $($(#[$doc:meta])* $field:ident = $symbol:literal ($($argument:ty),*) -> $result:ty;)* }
        later { $($(#[$later_doc:meta])* $later:ident = $later_symbol:literal ($($later_argument:ty),*) -> $later_result:ty;)* }
    ) => {
        /// NCCL's functions, by their names without the prefix. They are called as NCCL's user guide says.
        #[derive(Clone, Copy)]
        pub struct Functions {
            $($(#[$doc])* pub $field: unsafe extern "C" fn($($argument),*) -> $result,)*
            $($(#[$later_doc])* pub $later: Option<unsafe extern "C" fn($($later_argument),*) -> $later_result>,)*
        }

        impl Functions {
            /// Symbols of the functions that every library must have.
            pub const REQUIRED: &'static [&'static CStr] = &[$($symbol),*];

            /// Fills the table with the addresses that `symbol` returns for each name.
            ///
            /// # Safety
            ///
            /// For each name, `symbol` returns the address of NCCL's function of that name, or None. The address stays
            /// valid as long as the table or a copy of it is used.
            pub unsafe fn load(symbol: impl Fn(&'static CStr) -> Option<NonNull<c_void>>) -> Result<Functions, Missing> {
                Ok(Functions {
                    $($field: {
                        let address = symbol($symbol).ok_or(Missing($symbol))?.as_ptr();
                        // SAFETY: the caller promises that this function is there, and the signature is NCCL's.
                        unsafe {
                            std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($argument),*) -> $result>(address)
                        }
                    },)*
                    $($later: symbol($later_symbol).map(|address| {
                        // SAFETY: as above.
                        unsafe {
                            std::mem::transmute::<
                                *mut c_void,
                                unsafe extern "C" fn($($later_argument),*) -> $later_result,
                            >(address.as_ptr())
                        }
                    }),)*
                })
            }
        }
    };
}

table! {
    required {
        /// Writes the library's version: 10000 times the major, 100 times the minor, and the patch number.
        get_version = c"ncclGetVersion" (*mut c_int) -> ncclResult_t;
        /// Creates the id of a new communicator.
        get_unique_id = c"ncclGetUniqueId" (*mut ncclUniqueId) -> ncclResult_t;
        /// Creates this rank's communicator: communicator, ranks, id, this rank, configuration.
        comm_init_rank_config = c"ncclCommInitRankConfig"
            (*mut ncclComm_t, c_int, ncclUniqueId, c_int, *mut ncclConfig_t) -> ncclResult_t;
        /// Ends the operations of a communicator; the first step of an orderly end.
        comm_finalize = c"ncclCommFinalize" (ncclComm_t) -> ncclResult_t;
        /// Frees a communicator that has been finalized.
        comm_destroy = c"ncclCommDestroy" (ncclComm_t) -> ncclResult_t;
        /// Aborts the operations of a communicator, including its kernels, and frees it.
        comm_abort = c"ncclCommAbort" (ncclComm_t) -> ncclResult_t;
        /// Writes the state of a communicator: in progress, success, or the error.
        comm_get_async_error = c"ncclCommGetAsyncError" (ncclComm_t, *mut ncclResult_t) -> ncclResult_t;
        /// Returns the text of a result; static, NUL-terminated.
        get_error_string = c"ncclGetErrorString" (ncclResult_t) -> *const c_char;
        /// Returns the text of the last error of this process; NUL-terminated. The communicator may be null.
        get_last_error = c"ncclGetLastError" (ncclComm_t) -> *const c_char;
        /// Writes the number of ranks.
        comm_count = c"ncclCommCount" (ncclComm_t, *mut c_int) -> ncclResult_t;
        /// Writes the communicator's rank.
        comm_user_rank = c"ncclCommUserRank" (ncclComm_t, *mut c_int) -> ncclResult_t;
        /// Writes the number of the communicator's device.
        comm_cu_device = c"ncclCommCuDevice" (ncclComm_t, *mut c_int) -> ncclResult_t;
        /// Begins a group: calls up to `group_end` are collected.
        group_start = c"ncclGroupStart" () -> ncclResult_t;
        /// Ends a group: enqueues the collected calls.
        group_end = c"ncclGroupEnd" () -> ncclResult_t;
        /// Source, target, elements, type, operation, communicator, stream.
        all_reduce = c"ncclAllReduce"
            (*const c_void, *mut c_void, usize, ncclDataType_t, ncclRedOp_t, ncclComm_t, cudaStream_t) -> ncclResult_t;
        /// Source, target, elements, type, operation, root, communicator, stream.
        reduce = c"ncclReduce"
            (*const c_void, *mut c_void, usize, ncclDataType_t, ncclRedOp_t, c_int, ncclComm_t, cudaStream_t) -> ncclResult_t;
        /// Source, target, elements, type, root, communicator, stream.
        broadcast = c"ncclBroadcast"
            (*const c_void, *mut c_void, usize, ncclDataType_t, c_int, ncclComm_t, cudaStream_t) -> ncclResult_t;
        /// Source, target, elements that a rank sends, type, communicator, stream.
        all_gather = c"ncclAllGather"
            (*const c_void, *mut c_void, usize, ncclDataType_t, ncclComm_t, cudaStream_t) -> ncclResult_t;
        /// Source, target, elements that a rank receives, type, operation, communicator, stream.
        reduce_scatter = c"ncclReduceScatter"
            (*const c_void, *mut c_void, usize, ncclDataType_t, ncclRedOp_t, ncclComm_t, cudaStream_t) -> ncclResult_t;
        /// Source, elements, type, receiving rank, communicator, stream.
        send = c"ncclSend" (*const c_void, usize, ncclDataType_t, c_int, ncclComm_t, cudaStream_t) -> ncclResult_t;
        /// Target, elements, type, sending rank, communicator, stream.
        recv = c"ncclRecv" (*mut c_void, usize, ncclDataType_t, c_int, ncclComm_t, cudaStream_t) -> ncclResult_t;
    }
    later {
        /// Since 2.28. Source, target, elements for each rank, type, communicator, stream.
        all_to_all = c"ncclAlltoAll"
            (*const c_void, *mut c_void, usize, ncclDataType_t, ncclComm_t, cudaStream_t) -> ncclResult_t;
        /// Since 2.27. Communicator, ranks to leave out and their number, new communicator, configuration, flags.
        comm_shrink = c"ncclCommShrink"
            (ncclComm_t, *mut c_int, c_int, *mut ncclComm_t, *mut ncclConfig_t, c_int) -> ncclResult_t;
    }
}

impl fmt::Debug for Functions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Functions").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    extern "C" fn version_2_30_7(found: *mut c_int) -> ncclResult_t {
        // SAFETY: the callers in this file pass the address of an int.
        unsafe { *found = 23007 };
        ncclResult_t::SUCCESS
    }

    extern "C" fn failing(_: *mut c_int) -> ncclResult_t {
        ncclResult_t::INTERNAL_ERROR
    }

    fn address(function: extern "C" fn(*mut c_int) -> ncclResult_t) -> Option<NonNull<c_void>> {
        NonNull::new(function as *mut c_void)
    }

    #[test]
    fn the_first_function_that_is_absent_is_named() {
        for &absent in Functions::REQUIRED {
            // SAFETY: no function of this table is called.
            let loaded = unsafe { Functions::load(|name| address(failing).filter(|_| name != absent)) };
            let missing = loaded.unwrap_err();
            assert_eq!(missing, Missing(absent));
            assert_eq!(missing.to_string(), format!("has no function {}", absent.to_str().unwrap()));
        }
    }

    #[test]
    fn functions_of_later_versions_may_be_absent() {
        let required = |name: &'static CStr| Functions::REQUIRED.contains(&name).then(|| address(failing)).flatten();
        // SAFETY: no function of this table is called.
        let old = unsafe { Functions::load(required) }.unwrap();
        assert!(old.all_to_all.is_none() && old.comm_shrink.is_none());
        // SAFETY: as above.
        let new = unsafe { Functions::load(|_| address(failing)) }.unwrap();
        assert!(new.all_to_all.is_some() && new.comm_shrink.is_some());
    }

    #[test]
    fn a_function_of_the_table_is_the_one_of_the_library() {
        let symbol = |name: &'static CStr| address(if name == c"ncclGetVersion" { version_2_30_7 } else { failing });
        // SAFETY: the only function that is called has this signature.
        let table = unsafe { Functions::load(symbol) }.unwrap();
        let mut found = 0;
        // SAFETY: as above.
        assert_eq!(unsafe { (table.get_version)(&raw mut found) }, ncclResult_t::SUCCESS);
        assert_eq!(found, 23007);
    }
}
