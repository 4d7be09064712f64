//! The driver: the functions of `libcuda` that are used, and what they say of the devices.
//!
//! Names and numbers are those of the CUDA driver API, <https://docs.nvidia.com/cuda/cuda-driver-api/>.

use std::collections::BTreeMap;
use std::ffi::{CStr, c_char, c_int, c_uint};
use std::path::Path;
use std::sync::{Arc, Mutex, OnceLock};

use bagua_core as core;
use bagua_core::wait::lock;

use crate::api::Api;
use crate::codes::{CUdevice, CUresult, error_name};
use crate::context::{self, Context, Memory};
use crate::error::{Error, Result};
use crate::library::Library;

/// `CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR`.
const CAPABILITY_MAJOR: c_int = 75;

/// `CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR`.
const CAPABILITY_MINOR: c_int = 76;

/// Bytes for the name of a device; a longer one is cut off.
const NAME_BYTES: usize = 256;

/// The functions, by their names without the prefix.
#[derive(Clone, Copy)]
struct Functions {
    /// Number of devices.
    device_get_count: unsafe extern "C" fn(*mut c_int) -> CUresult,
    /// The device of an ordinal.
    device_get: unsafe extern "C" fn(*mut CUdevice, c_int) -> CUresult,
    /// Its name, NUL-terminated, in at most as many bytes.
    device_get_name: unsafe extern "C" fn(*mut c_char, c_int, CUdevice) -> CUresult,
    /// One of its attributes.
    device_get_attribute: unsafe extern "C" fn(*mut c_int, c_int, CUdevice) -> CUresult,
    /// Bytes of its memory.
    device_total_mem: unsafe extern "C" fn(*mut usize, CUdevice) -> CUresult,
    /// Its 16-byte identifier; that of the MIG instance, if it is one.
    device_get_uuid: unsafe extern "C" fn(*mut [u8; 16], CUdevice) -> CUresult,
}

impl Functions {
    fn load(library: &Library) -> Result<Functions> {
        // SAFETY: each type is the signature of the function that is named beside it, in every driver since CUDA 12.
        unsafe {
            Ok(Functions {
                device_get_count: library.function(c"cuDeviceGetCount")?,
                device_get: library.function(c"cuDeviceGet")?,
                device_get_name: library.function(c"cuDeviceGetName")?,
                device_get_attribute: library.function(c"cuDeviceGetAttribute")?,
                device_total_mem: library.function(c"cuDeviceTotalMem_v2")?,
                device_get_uuid: match library.find(c"cuDeviceGetUuid_v2") {
                    Some(function) => function,
                    None => library.function(c"cuDeviceGetUuid")?,
                },
            })
        }
    }
}

/// A loaded `libcuda`, which may or may not work.
pub struct Driver {
    library: Library,
    /// 1000 times the major and 10 times the minor version of CUDA that it serves; `None` when it does not say.
    version: Option<i32>,
    /// The devices, or why there are none.
    devices: Result<Vec<Device>>,
    /// The functions that operations use; set by the first operation.
    api: OnceLock<Result<Arc<Api>>>,
    /// Primary contexts of the devices that were used, by number.
    contexts: Mutex<BTreeMap<i32, Arc<Context>>>,
}

/// A device, as the driver describes it. What the driver did not tell is `None`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Device {
    /// Such as "NVIDIA H200".
    pub name: Option<String>,
    /// Compute capability: major, minor.
    pub capability: Option<(i32, i32)>,
    /// Bytes of memory.
    pub memory: Option<u64>,
    /// Identifier, equal in all processes.
    pub uuid: Option<[u8; 16]>,
}

impl Driver {
    /// Initialises the driver and asks for its devices.
    pub fn new(library: Library) -> Driver {
        let (version, devices) = (version(&library), devices(&library));
        Driver { library, version, devices, api: OnceLock::new(), contexts: Mutex::default() }
    }

    /// The file.
    pub fn path(&self) -> &Path {
        self.library.path()
    }

    /// The version of CUDA that it serves, "13.0" for instance.
    pub fn version(&self) -> Option<String> {
        self.version.map(|version| format!("{}.{}", version / 1000, version % 1000 / 10))
    }

    /// The devices, at least one; else why there are none.
    pub fn devices(&self) -> Result<&[Device]> {
        self.devices.as_deref().map_err(Error::clone)
    }

    /// The functions that operations use.
    fn api(&self) -> core::error::Result<&Arc<Api>> {
        self.devices()?;
        let api = self.api.get_or_init(|| Api::load(&self.library).map(Arc::new));
        Ok(api.as_ref().map_err(Error::clone)?)
    }

    /// The primary context of a device, by its number. The first call for a device may create it, which takes a while.
    ///
    /// # Errors
    /// `System` where there is no CUDA; `Device`.
    pub fn context(&self, device: i32) -> core::error::Result<Arc<Context>> {
        let api = self.api()?;
        let mut contexts = lock(&self.contexts);
        if let Some(context) = contexts.get(&device) {
            return Ok(Arc::clone(context));
        }
        let uuids = self.devices()?.iter().map(|device| device.uuid).collect();
        let context = Context::retain(api, device, uuids)?;
        contexts.insert(device, Arc::clone(&context));
        Ok(context)
    }

    /// What an address is.
    ///
    /// # Errors
    /// As [`Driver::context`].
    pub fn memory_at(&self, address: usize) -> core::error::Result<Memory> {
        let used = lock(&self.contexts).keys().next().copied();
        context::memory_at(self.api()?, address, || self.context(used.unwrap_or(0)))
    }
}

/// `cuDriverGetVersion`, which works before `cuInit` and when that fails.
fn version(library: &Library) -> Option<i32> {
    // SAFETY: the signature is the driver's.
    let get: unsafe extern "C" fn(*mut c_int) -> CUresult = unsafe { library.find(c"cuDriverGetVersion") }?;
    let mut version = 0;
    // SAFETY: it writes one int.
    (unsafe { get(&raw mut version) } == 0).then_some(version)
}

/// Initialises the driver and describes all devices.
fn devices(library: &Library) -> Result<Vec<Device>> {
    // SAFETY: the signature is the driver's.
    let init: unsafe extern "C" fn(c_uint) -> CUresult = unsafe { library.function(c"cuInit") }?;
    // SAFETY: 0 is the only flag that there is, and it may be called again.
    check(library, "cuInit", unsafe { init(0) })?;
    let functions = Functions::load(library)?;
    let mut count = 0;
    // SAFETY: it writes one int.
    check(library, "cuDeviceGetCount", unsafe { (functions.device_get_count)(&raw mut count) })?;
    if count <= 0 {
        return Err(Error::NoDevice { library: library.text() });
    }
    (0..count)
        .map(|ordinal| {
            let mut device = 0;
            // SAFETY: it writes one number.
            check(library, "cuDeviceGet", unsafe { (functions.device_get)(&raw mut device, ordinal) })?;
            Ok(describe(&functions, device))
        })
        .collect()
}

/// What the driver tells of one device.
fn describe(functions: &Functions, device: CUdevice) -> Device {
    let mut bytes = [0u8; NAME_BYTES];
    // The last byte is kept, so that the name ends whatever is written.
    // SAFETY: it writes at most as many bytes as it is told.
    let code = unsafe { (functions.device_get_name)(bytes.as_mut_ptr().cast(), NAME_BYTES as c_int - 1, device) };
    let name = CStr::from_bytes_until_nul(&bytes).ok().filter(|_| code == 0);
    let name = name.map(|name| name.to_string_lossy().into_owned());
    let attribute = |number| {
        let mut value = 0;
        // SAFETY: it writes one int.
        (unsafe { (functions.device_get_attribute)(&raw mut value, number, device) } == 0).then_some(value)
    };
    let capability = attribute(CAPABILITY_MAJOR).zip(attribute(CAPABILITY_MINOR));
    let mut memory = 0;
    // SAFETY: it writes one size.
    let code = unsafe { (functions.device_total_mem)(&raw mut memory, device) };
    let memory = (code == 0).then_some(memory as u64);
    let mut uuid = [0; 16];
    // SAFETY: it writes 16 bytes.
    let code = unsafe { (functions.device_get_uuid)(&raw mut uuid, device) };
    Device { name, capability, memory, uuid: (code == 0).then_some(uuid) }
}

/// An error for any code but 0.
fn check(library: &Library, function: &'static str, code: CUresult) -> Result<()> {
    if code == 0 {
        return Ok(());
    }
    // SAFETY: the signature is the driver's.
    let get_name = unsafe { library.find(c"cuGetErrorName") };
    Err(library.failed(function, error_name(get_name, code), code))
}
