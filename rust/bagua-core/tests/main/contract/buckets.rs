//! Buckets on the toy device: every operation writes what it writes on the host, and the device gets marks and waits.

use std::sync::Arc;
use std::time::Duration;

use bagua_core::bucket::{Bucket, Tensor};
use bagua_core::codec;
use bagua_core::collective::CollectiveFactory;
use bagua_core::engine::{Engine, SharedBucket};
use bagua_core::error::{Error, Result};
use bagua_core::group::Lane;
use bagua_core::health::GroupHealth;
use bagua_core::memory::{Device, Region, WeightLock};
use bagua_core::op::{
    AsyncModelAverageOp, CallbackOp, CentralizedOp, CompressedOp, DecentralizedOp, ExtraTensor,
    LowPrecisionDecentralizedOp, Op,
};
use bagua_core::request::PeerSelection;
use bagua_core::stats::Stats;
use bagua_core::types::DType;
use bagua_core::wait::Waited;

use super::toy::{Toy, ToyFactory, ToyMemory};
use super::world::local;

const LONG: Option<Duration> = Some(Duration::from_secs(60));

/// Elements of a bucket's tensors.
const COUNTS: [usize; 3] = [5000, 1, 300];

/// Memory of some elements on the host or on the toy device.
enum Memory {
    Host(Vec<f32>),
    Toy(ToyMemory),
}

impl Memory {
    fn new(device: Option<&Arc<dyn Device>>, values: &[f32]) -> Memory {
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_ne_bytes()).collect();
        match device {
            None => Memory::Host(values.to_vec()),
            Some(device) => Memory::Toy(ToyMemory::of(device, &bytes)),
        }
    }

    /// `count` elements from `first` on.
    fn region(&mut self, device: Option<&Arc<dyn Device>>, first: usize, count: usize) -> Region {
        match (self, device) {
            // SAFETY: the array lives longer than the bucket, and is read when the bucket is idle.
            (Memory::Host(array), _) => unsafe {
                Region::new(array[first..first + count].as_mut_ptr().cast(), count, DType::F32).unwrap()
            },
            // SAFETY: as above.
            (Memory::Toy(memory), Some(device)) => unsafe {
                let at = (memory.address() + 4 * first) as *mut u8;
                Region::on(Arc::clone(device), at, count, DType::F32).unwrap()
            },
            (Memory::Toy(_), None) => unreachable!("toy memory has a device"),
        }
    }

    fn bytes(&self) -> Vec<u8> {
        match self {
            Memory::Host(array) => array.iter().flat_map(|value| value.to_ne_bytes()).collect(),
            Memory::Toy(memory) => memory.bytes(),
        }
    }
}

fn engine(rank: usize, collective: Box<dyn bagua_core::collective::Collective>) -> (Engine, Arc<GroupHealth>) {
    let health = GroupHealth::local(rank, 2);
    let collective = ToyFactory.wrap(collective, &[vec![0, 1]]);
    let lane = Lane::new(collective, health.clone(), Arc::new(Stats::default()), 0, 0, Duration::from_secs(60));
    (Engine::over(lane, health.clone(), "model").unwrap(), health)
}

type Make = fn() -> (Arc<dyn Op>, &'static [(&'static str, usize)]);

fn minmax() -> Arc<dyn codec::Codec> {
    codec::by_name("minmax_u8", &[]).unwrap()
}

const COUNT: usize = 5301;
const OPERATIONS: [Make; 7] = [
    || (Arc::new(CentralizedOp::new(true, false, false)), &[]),
    || (Arc::new(CompressedOp::new(minmax(), true, false, true, 0)), &[("error", COUNT)]),
    || (Arc::new(CompressedOp::new(minmax(), false, false, false, 0)), &[]),
    || (Arc::new(DecentralizedOp::new(PeerSelection::Ring, false)), &[("peer_weight", COUNT)]),
    || (Arc::new(AsyncModelAverageOp::new(WeightLock::new())), &[]),
    || {
        let replicas = &[("weight", COUNT), ("left_peer_weight", COUNT), ("right_peer_weight", COUNT)];
        (Arc::new(LowPrecisionDecentralizedOp::new(minmax(), false)), replicas)
    },
    || (Arc::new(CompressedOp::new(minmax(), false, false, false, 24)), &[]),
];

/// Returns the tensors and the extra tensors after two steps of an operation.
fn after_two_steps(
    rank: usize,
    collective: Box<dyn bagua_core::collective::Collective>,
    make: Make,
    flat: bool,
    device: Option<&Arc<dyn Device>>,
) -> Vec<Vec<u8>> {
    let values: Vec<f32> = (0..COUNT).map(|at| ((at * 37 + rank * 11) % 101) as f32 / 7.0 - 3.0).collect();
    let mut memory = if flat {
        vec![Memory::new(device, &values)]
    } else {
        let mut rest = &values[..];
        let part = |count| {
            let (head, tail) = rest.split_at(count);
            rest = tail;
            Memory::new(device, head)
        };
        COUNTS.into_iter().map(part).collect()
    };
    let (op, extra) = make();
    let mut first = 0;
    let mut tensors = Vec::new();
    for (number, count) in COUNTS.into_iter().enumerate() {
        let region =
            if flat { memory[0].region(device, first, count) } else { memory[number].region(device, 0, count) };
        tensors.push(Tensor { name: number.to_string(), region, padding: false });
        first += count;
    }
    let bucket = SharedBucket::new(Bucket::new("bucket", tensors).unwrap());
    bucket.lock().append(op).unwrap();
    let mut extras: Vec<_> = extra.iter().map(|(_, count)| Memory::new(device, &vec![0.0; *count])).collect();
    for ((name, count), memory) in extra.iter().zip(&mut extras) {
        bucket
            .lock()
            .attach(ExtraTensor { name: (*name).to_owned(), region: memory.region(device, 0, *count) })
            .unwrap();
    }
    let (engine, _health) = engine(rank, collective);
    engine.register(vec![bucket.clone()]).unwrap();
    for _ in 0..2 {
        (0..COUNTS.len()).for_each(|tensor| engine.mark_ready(tensor, None, Some(7)).unwrap());
        assert_eq!(engine.wait(LONG).unwrap(), 1);
    }
    if extra.first().is_some_and(|(name, _)| *name == "peer_weight") {
        bucket.lock().copy_from_extra("peer_weight", Some(7)).unwrap();
    }
    engine.shutdown();
    memory.iter().chain(&extras).map(Memory::bytes).collect()
}

#[test]
fn every_operation_writes_to_a_device_what_it_writes_to_the_host() {
    for (number, make) in OPERATIONS.into_iter().enumerate() {
        for flat in [true, false] {
            let [on_host, on_toy] = [false, true].map(|toy| {
                std::thread::scope(|scope| {
                    let run = |(rank, collective)| {
                        scope.spawn(move || {
                            let device = toy.then(|| Toy::device(rank));
                            after_two_steps(rank, collective, make, flat, device.as_ref())
                        })
                    };
                    let ranks: Vec<_> = local(2).into_iter().enumerate().map(run).collect();
                    ranks.into_iter().map(|rank| rank.join().unwrap()).collect::<Vec<_>>()
                })
            });
            for (expected, found) in on_host.into_iter().zip(on_toy) {
                assert!(expected == found, "operation {number}, flat: {flat}");
            }
        }
    }
}

/// A bucket of two tensors on the device, with the memory of both.
fn bucket_on(device: &Arc<dyn Device>) -> (SharedBucket, [Memory; 2]) {
    let mut memory = [0, 1].map(|_| Memory::new(Some(device), &[1.0, 2.0]));
    let tensor = |(number, memory): (usize, &mut Memory)| Tensor {
        name: number.to_string(),
        region: memory.region(Some(device), 0, 2),
        padding: false,
    };
    let tensors = memory.iter_mut().enumerate().map(tensor).collect();
    (SharedBucket::new(Bucket::new("bucket", tensors).unwrap()), memory)
}

fn alone() -> (Engine, Arc<GroupHealth>) {
    let health = GroupHealth::local(0, 1);
    let solo = ToyFactory.wrap(Box::new(bagua_core::collective::Solo::new()), &[vec![0]]);
    let lane = Lane::new(solo, health.clone(), Arc::new(Stats::default()), 0, 0, Duration::from_secs(60));
    (Engine::over(lane, health.clone(), "model").unwrap(), health)
}

#[test]
fn a_device_gets_marks_before_the_operations_and_the_streams_of_waits() {
    let device = Toy::device(0);
    let (bucket, _memory) = bucket_on(&device);
    bucket.lock().append(Arc::new(CallbackOp::new(|_| Ok(())))).unwrap();
    let (engine, _) = alone();
    engine.register(vec![bucket]).unwrap();
    engine.mark_ready(0, None, Some(5)).unwrap();
    engine.mark_ready(1, None, None).unwrap();
    let long = Duration::from_secs(60);
    let refused = engine.wait_for(long, Some(Toy::REFUSED));
    assert!(matches!(refused, Waited::Done(Err(Error::NotImplemented(_)))), "{refused:?}");
    assert_eq!(engine.wait_for(long, Some(6)), Waited::Done(Ok(1)), "the wait that was refused has reported nothing");
    engine.shutdown();
    let said = ["prepare", "mark 5", "mark own", "order own", "mark own", "finish", "order 6", "end"];
    assert_eq!(Toy::calls(&device), said);
}

#[test]
fn a_stream_that_a_device_refuses_marks_nothing() {
    let device = Toy::device(0);
    let (bucket, _memory) = bucket_on(&device);
    let (engine, health) = alone();
    engine.register(vec![bucket]).unwrap();
    assert!(matches!(engine.mark_ready(0, None, Some(Toy::REFUSED)), Err(Error::NotImplemented(_))));
    engine.mark_ready(0, None, Some(1)).unwrap();
    engine.mark_ready(1, None, Some(1)).unwrap();
    assert_eq!(engine.wait(LONG), Ok(1));
    assert!(health.check().is_ok());
}

#[test]
fn equal_addresses_are_one_memory_on_one_device_only() {
    let bucket = |number: usize, device: Arc<dyn Device>| {
        // SAFETY: the engine is given the regions, and communicates nothing.
        let region = unsafe { Region::on(device, 0x1000 as *mut u8, 4, DType::F32).unwrap() };
        let tensor = Tensor { name: format!("tensor {number}"), region, padding: false };
        SharedBucket::new(Bucket::new(&format!("bucket {number}"), vec![tensor]).unwrap())
    };
    let (engine, _) = alone();
    engine.register(vec![bucket(0, Toy::device(0)), bucket(1, Toy::device(1))]).unwrap();
    let mut host = [0f32; 4];
    let same = Toy::device(0);
    for second in [Arc::clone(&same), Toy::device(0)] {
        let refused = engine.register(vec![bucket(0, Arc::clone(&same)), bucket(1, second)]).unwrap_err();
        assert_eq!(
            refused.to_string(),
            "tensors 'tensor 0' of bucket 'bucket 0' and 'tensor 1' of bucket 'bucket 1' share memory"
        );
    }
    // SAFETY: as above.
    let region = unsafe { Region::new(host.as_mut_ptr().cast(), 4, DType::F32).unwrap() };
    let address = region.address() as *mut u8;
    // SAFETY: as above.
    let there = unsafe { Region::on(same, address, 4, DType::F32).unwrap() };
    let tensors = [("here", region), ("there", there)];
    let buckets = tensors.map(|(name, region)| {
        let tensor = Tensor { name: name.to_owned(), region, padding: false };
        SharedBucket::new(Bucket::new(name, vec![tensor]).unwrap())
    });
    engine.register(buckets.into()).unwrap();
}

#[test]
fn tensors_of_two_places_are_refused_by_name() {
    let device = Toy::device(0);
    let (bucket, _memory) = bucket_on(&device);
    let mut host = Memory::new(None, &[1.0, 2.0]);
    let extra = ExtraTensor { name: "error".to_owned(), region: host.region(None, 0, 2) };
    let text = |result: Result<()>| match result {
        Err(Error::UnsupportedType(text)) => text,
        other => panic!("{other:?}"),
    };
    assert_eq!(text(bucket.lock().attach(extra)), "bucket 'bucket': tensor 'error' is on the host but '0' is on toy:0");
    let mut there = Memory::new(Some(&device), &[1.0, 2.0]);
    let tensors = vec![
        Tensor { name: "a".to_owned(), region: host.region(None, 0, 2), padding: false },
        Tensor { name: "b".to_owned(), region: there.region(Some(&device), 0, 2), padding: false },
    ];
    assert_eq!(
        text(Bucket::new("mixed", tensors).map(drop)),
        "bucket 'mixed': tensor 'b' is on toy:0 but 'a' is on the host"
    );
    let (engine, _) = alone();
    engine.register(vec![bucket]).unwrap();
    assert_eq!(
        text(engine.mark_ready(0, Some(host.region(None, 0, 2)), None)),
        "tensor '0' is on toy:0, but its new memory is on the host"
    );
}
