//! The session with a connected peer: its reader and writer tasks, and the heartbeat that detects lost peers.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::io::{AsyncWriteExt, BufReader, WriteHalf};

use super::super::connection::{AsyncSocket, ControlConn};
use super::super::wire::{Encoding, FRAME_LIMIT, read_frame};
use super::message::Message;
use super::peers::{Frames, Peer};
use super::plane::{Loss, Plane};
use super::silence::Lateness;
use crate::error::Source;

/// The most frames that are written by one call.
const AT_ONCE: usize = 16;

/// Bytes that are read from a connection at once, where so many have come.
const READ: usize = 2048;

/// Starts reading from a peer and writing to it, on the control thread. False when the peer is connected already.
pub(super) fn start(plane: &Arc<Plane>, rank: usize, conn: ControlConn) -> bool {
    let Some((peer, frames)) = plane.connected(rank, conn.is_unix()) else { return false };
    conn.expedite();
    tokio::spawn(read_loop(Arc::clone(plane), rank, conn, peer, frames));
    true
}

/// Reads from a peer until the connection ends; a second task writes to it.
async fn read_loop(plane: Arc<Plane>, rank: usize, conn: ControlConn, peer: Arc<Peer>, frames: Frames) {
    let same_host = conn.is_unix();
    let ControlConn { fork_fd: _fork_fd, socket } = conn;
    let (reader, writer) = tokio::io::split(socket);
    let mut reader = BufReader::with_capacity(READ, reader);
    peer.send(&Message::Heartbeat);
    tokio::spawn(write(writer, Arc::clone(&peer), frames));
    let mut has_come = false;
    let (how, source, loss) = loop {
        let body = match read_frame(&mut reader, FRAME_LIMIT).await {
            Ok(body) => body,
            Err(error) if error.kind() == std::io::ErrorKind::InvalidData => {
                break (format!("it sent a malformed frame: {error}"), Source::default(), Loss::Silent);
            }
            Err(error) => {
                let suffix = if same_host { " on this host" } else { "" };
                let detail = match error.kind() {
                    std::io::ErrorKind::UnexpectedEof => "end of stream".to_owned(),
                    _ => error.to_string(),
                };
                // A router may reset a connection that was silent; between processes of one host only their ends break it.
                let is_end = same_host || detail == "end of stream" || !plane.is_silent(rank);
                let loss = if is_end { Loss::Ended } else { Loss::Silent };
                break (format!("its process died{suffix} or its connection broke ({detail})"), error.into(), loss);
            }
        };
        match Message::parse(&body) {
            Ok(message) => {
                has_come = true;
                peer.note_arrival(Instant::now());
                handle(&plane, rank, message);
            }
            Err(malformed) => {
                break (format!("it sent a malformed message: {malformed}"), Source::default(), Loss::Silent);
            }
        }
    };
    // A peer that left before its end of the connection was ready has closed it, and said so to others.
    plane.disconnected(rank, has_come.then_some((how.as_str(), loss)), &source);
}

async fn write(mut writer: WriteHalf<AsyncSocket>, peer: Arc<Peer>, mut frames: Frames) {
    let mut queued = Vec::new();
    loop {
        let count = frames.recv_many(&mut queued, AT_ONCE).await;
        // The reader reports a broken connection.
        if count == 0 || writer.write_all(&queued.concat()).await.is_err() {
            return;
        }
        queued.clear();
        peer.note_written(count);
    }
}

/// Handles a message from a peer.
fn handle(plane: &Arc<Plane>, rank: usize, message: Message) {
    match message {
        Message::Heartbeat => {}
        Message::Connected { apart } => plane.assemble(|assembly| assembly.reported(rank, apart)),
        Message::Complete { apart } => plane.assemble(|assembly| assembly.completed(apart)),
        Message::Notice(notice) => plane.received_notice(rank, notice),
        Message::Routed(routed) => plane.received_routed(routed),
        Message::LeaveAck => plane.acknowledged(rank),
    }
}

/// Sends heartbeats, detects silent peers, and replaces connections to those that are gone, until the thread ends.
pub(super) async fn heartbeat(plane: Arc<Plane>) {
    let period = period(&plane);
    let frame = Message::Heartbeat.frame();
    let mut lateness = Lateness::new(period, Instant::now());
    loop {
        let now = Instant::now();
        plane.beat(now, lateness.next(now), &frame);
        plane.repair();
        tokio::time::sleep(period).await;
    }
}

/// The time between two heartbeats.
pub(super) fn period(plane: &Plane) -> Duration {
    (plane.config.heartbeat_timeout / 5).clamp(Duration::from_millis(1), Duration::from_secs(1))
}
