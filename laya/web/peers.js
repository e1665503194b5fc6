// Owns: a line for each other Laya whose models are served here: whether it answers, and what is free there.

import { element, keep, size, write } from "./element.js";

export function drawPeers(list, peers) {
  list.hidden = !peers.length;
  keep(list, peers, (peer) => peer.name, () => element("li"), (line, peer) => {
    line.className = peer.state;
    const isThere = peer.state === "reachable";
    const room = isThere ? `${size(peer.free_bytes)} of ${size(peer.budget_bytes)} free, models: ${peer.models}` : peer.error ?? "";
    write(line, ["peer " + peer.name, peer.url, peer.state, room].filter(Boolean).join(" · "));
  });
}
