// A chat is a tree of messages: an edited question and another answer are siblings. Pure functions over Map(id → node).

/** From the first message to a leaf. */
export function pathTo(nodes, leafId) {
  const path = [];
  for (let node = nodes.get(leafId); node && path.length < nodes.size; node = nodes.get(node.parent_id)) path.push(node);
  return path.reverse();
}

const byAge = (one, other) => one.created_s - other.created_s || (one.id < other.id ? -1 : 1);

export function childrenOf(nodes, parentId) {
  return [...nodes.values()].filter((node) => node.parent_id === parentId).sort(byAge);
}

/** The node itself among those that could stand in its place, oldest first. */
export function variantsOf(nodes, node) {
  return childrenOf(nodes, node.parent_id).filter((other) => other.role === node.role);
}

/** The end of the newest branch below a node. */
export function newestLeaf(nodes, id) {
  let leaf = id;
  for (let below = childrenOf(nodes, leaf); below.length; below = childrenOf(nodes, leaf)) leaf = below.at(-1).id;
  return leaf;
}

export const isBusy = (node) => node !== undefined && (node.state === "waiting" || node.state === "streaming");
