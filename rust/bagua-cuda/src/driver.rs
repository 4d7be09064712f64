//! The driver: a loaded `libcuda` and its devices.
//!
//! Reference of the CUDA driver API: <https://docs.nvidia.com/cuda/cuda-driver-api/>.

use std::collections::BTreeMap;
use std::ffi::{CStr, c_int};
use std::path::Path;
use std::sync::{Arc, Mutex, OnceLock};

use bagua_core as core;
use bagua_core::wait::lock;
use cudarc::driver::sys::{CUdevice, CUdevice_attribute};

use crate::calls::{Code, call_at, call_in};
use crate::context::{self, Context, Memory};
use crate::driver_functions::Api;
use crate::error::{Error, Result};
use crate::error_names::error_name;
use crate::shared_library::Library;

const NAME_BYTES: usize = 256;

/// A loaded `libcuda`, which may or may not work.
pub struct Driver {
    library: Library,
    /// Supported CUDA version: 1000 times the major plus 10 times the minor version. `None` if unknown.
    version: Option<i32>,
    /// The devices, or the reason why there are none.
    devices: Result<Vec<Device>>,
    /// Functions that operations use, loaded by the first operation.
    api: OnceLock<Result<Arc<Api>>>,
    /// Primary contexts of the devices in use, by device number.
    contexts: Mutex<BTreeMap<i32, Arc<Context>>>,
}

/// A device as described by the driver. Properties that the driver did not report are `None`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Device {
    /// Name of the device, for example "NVIDIA H200".
    pub name: Option<String>,
    /// Compute capability, major and minor.
    pub capability: Option<(i32, i32)>,
    /// Size of the memory in bytes.
    pub memory: Option<u64>,
    /// Identifier, which is the same in all processes.
    pub uuid: Option<[u8; 16]>,
}

impl Driver {
    /// Initialises the driver and lists its devices.
    pub fn new(library: Library) -> Driver {
        let (version, devices) = (version(&library), devices(&library));
        Driver { library, version, devices, api: OnceLock::new(), contexts: Mutex::default() }
    }

    /// Returns the library's file.
    pub fn path(&self) -> &Path {
        self.library.path()
    }

    /// Returns the CUDA version that the driver supports, for example "13.0".
    pub fn version(&self) -> Option<String> {
        self.version.map(|version| format!("{}.{}", version / 1000, version % 1000 / 10))
    }

    /// Returns at least one device, or the reason why there are none.
    pub fn devices(&self) -> Result<&[Device]> {
        self.devices.as_deref().map_err(Error::clone)
    }

    fn api(&self) -> core::error::Result<&Arc<Api>> {
        self.devices()?;
        let api = self.api.get_or_init(|| Api::load(&self.library).map(Arc::new));
        Ok(api.as_ref().map_err(Error::clone)?)
    }

    /// Returns the primary context of a device by its number. The first call for a device may create it, which is slow.
    /// Fails with `Unavailable` if CUDA cannot be used, or with `Device` if a call fails.
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

    /// Returns the kind of memory at an address. Returns the errors of [`Driver::context`].
    pub fn memory_at(&self, address: usize) -> core::error::Result<Memory> {
        let used = lock(&self.contexts).keys().next().copied();
        context::memory_at(self.api()?, address, || self.context(used.unwrap_or(0)))
    }
}

/// Calls `cuDriverGetVersion`, which works before `cuInit` and even if `cuInit` fails.
fn version(library: &Library) -> Option<i32> {
    let mut version = 0;
    // SAFETY: the function writes one int.
    (unsafe { call_in!(library, driver::cuDriverGetVersion(&raw mut version)) } == Ok(0)).then_some(version)
}

fn devices(library: &Library) -> Result<Vec<Device>> {
    // SAFETY: the only valid flag is 0, and the function may be called again.
    check(library, "cuInit", unsafe { call_in!(library, driver::cuInit(0)) }?)?;
    let mut count = 0;
    // SAFETY: the function writes one int.
    check(library, "cuDeviceGetCount", unsafe { call_in!(library, driver::cuDeviceGetCount(&raw mut count)) }?)?;
    if count <= 0 {
        return Err(Error::NoDevice { library: library.text() });
    }
    (0..count)
        .map(|ordinal| {
            let mut device = 0;
            // SAFETY: the function writes one number.
            let code = unsafe { call_in!(library, driver::cuDeviceGet(&raw mut device, ordinal)) }?;
            check(library, "cuDeviceGet", code)?;
            describe(library, device)
        })
        .collect()
}

/// Returns the driver's description of one device. Returns an error only if a function is missing.
fn describe(library: &Library, device: CUdevice) -> Result<Device> {
    let mut bytes = [0u8; NAME_BYTES];
    // The last byte is reserved, so that the name is always terminated.
    let room = NAME_BYTES as c_int - 1;
    // SAFETY: the function writes at most `room` bytes.
    let code = unsafe { call_in!(library, driver::cuDeviceGetName(bytes.as_mut_ptr().cast(), room, device)) }?;
    let name = CStr::from_bytes_until_nul(&bytes).ok().filter(|_| code == 0);
    let name = name.map(|name| name.to_string_lossy().into_owned());
    let attribute = |number| {
        let mut value = 0;
        // SAFETY: the function writes one int.
        let code = unsafe { call_in!(library, driver::cuDeviceGetAttribute(&raw mut value, number, device)) }?;
        Ok((code == 0).then_some(value))
    };
    let major = attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
    let minor = attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
    let mut memory = 0;
    // SAFETY: the function writes one size.
    let code = unsafe { call_in!(library, driver::cuDeviceTotalMem_v2(&raw mut memory, device)) }?;
    let memory = (code == 0).then_some(memory as u64);
    let mut uuid = [0; 16];
    // The second version reports the id of a MIG instance, if the device is one. Both have the same parameters.
    let identify = library.address(c"cuDeviceGetUuid_v2").or_else(|_| library.address(c"cuDeviceGetUuid"))?;
    // SAFETY: the function writes 16 bytes.
    let code = unsafe { call_at!(identify, driver::cuDeviceGetUuid_v2((&raw mut uuid).cast(), device)) };
    Ok(Device { name, capability: major.zip(minor), memory, uuid: (code == 0).then_some(uuid) })
}

fn check(library: &Library, function: &'static str, code: Code) -> Result<()> {
    if code == 0 {
        return Ok(());
    }
    // SAFETY: the signature is the driver's.
    let get_name = unsafe { library.find(c"cuGetErrorName") };
    Err(library.failed(function, error_name(get_name, code), code))
}
