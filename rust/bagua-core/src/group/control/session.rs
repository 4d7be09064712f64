//! A living control connection: what is read from it, what is written to it, and when its peer is declared lost.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use tokio::io::{AsyncWriteExt, WriteHalf};
use tokio::sync::mpsc;

use super::super::connection::{AsyncSocket, ControlConn};
use super::super::wire::{FRAME_LIMIT, Message, read_frame};
use super::{ALIVE, Plane};
use crate::error::Source;
use crate::wait::lock;

/// Reads from a peer until the connection ends; a second task writes.
pub(super) async fn read_loop(
    plane: Arc<Plane>,
    rank: usize,
    conn: ControlConn,
    frames: mpsc::UnboundedReceiver<Vec<u8>>,
) {
    let near = conn.is_unix();
    let ControlConn { fork_fd: _fork_fd, socket } = conn;
    let (mut reader, writer) = tokio::io::split(socket);
    tokio::spawn(write(writer, frames));
    let (how, source) = loop {
        let body = match read_frame(&mut reader, FRAME_LIMIT).await {
            Ok(body) => body,
            Err(error) if error.kind() == std::io::ErrorKind::InvalidData => {
                break (format!("it spoke nonsense: {error}"), Source::default());
            }
            Err(error) => {
                let place = if near { " on this host" } else { "" };
                let detail = match error.kind() {
                    std::io::ErrorKind::UnexpectedEof => "end of stream".to_owned(),
                    _ => error.to_string(),
                };
                break (format!("its process died{place} or its connection broke ({detail})"), error.into());
            }
        };
        match Message::parse(&body) {
            Ok(message) => handle(&plane, rank, message),
            Err(garbled) => break (format!("it spoke nonsense: {garbled}"), Source::default()),
        }
    };
    plane.lost(rank, &how, &source);
    settle(&plane, rank);
}

async fn write(mut writer: WriteHalf<AsyncSocket>, mut frames: mpsc::UnboundedReceiver<Vec<u8>>) {
    while let Some(frame) = frames.recv().await {
        // The reader notices what is wrong with a connection, and says so.
        if writer.write_all(&frame).await.is_err() {
            return;
        }
    }
}

fn settle(plane: &Plane, rank: usize) {
    if let Some(peer) = plane.peer(rank) {
        peer.settled.store(true, Ordering::Release);
        plane.settled.notify_one();
    }
}

/// Acts on a message.
fn handle(plane: &Plane, rank: usize, message: Message) {
    let Some(peer) = plane.peer(rank) else { return };
    if let Some(heard) = lock(&peer.heard).as_mut() {
        *heard = Instant::now();
    }
    match message {
        Message::Heartbeat => {}
        Message::Near(all) => {
            *lock(&peer.heard) = Some(Instant::now());
            lock(&plane.building).near.insert(rank, all);
            plane.built.notify_all();
        }
        Message::Fail { group, cause } => plane.peer_reported(rank, group, cause),
        Message::Bye { group } => plane.peer_left(rank, group),
        Message::Heard => settle(plane, rank),
    }
}

/// Says that this rank lives, and looks who does not, until the thread ends.
pub(super) async fn heartbeat(plane: Arc<Plane>) {
    let timeout = plane.config.heartbeat_timeout;
    let period = (timeout / 5).clamp(Duration::from_millis(1), Duration::from_secs(1));
    let frame = Message::Heartbeat.frame();
    let mut last = Instant::now();
    loop {
        let now = Instant::now();
        // This process was stopped, or starved of the processor: what the peers said meanwhile was not heard.
        let was_away = now.duration_since(last) > timeout / 2;
        last = now;
        for (rank, peer) in plane.all_peers() {
            if peer.state.load(Ordering::Acquire) != ALIVE {
                continue;
            }
            let _ = peer.outbox.send(frame.clone());
            let mut heard = lock(&peer.heard);
            let Some(at) = heard.as_mut() else { continue };
            if was_away {
                *at = now;
            }
            let silent = now.saturating_duration_since(*at) > timeout;
            drop(heard);
            if silent {
                plane.lost(rank, &format!("no heartbeat for {:.1} s", timeout.as_secs_f64()), &Source::default());
            }
        }
        tokio::time::sleep(period).await;
    }
}
