// Keeps a page up to date: what the server renders anew is put in place of what stands there, node by node, so that focus,
// selection, open details and the scroll position stay. Nothing is computed here.
const address = document.body.dataset.events;
const offline = document.getElementById("offline");
let stream = null;

function update(old, fresh) {
  if (old.isEqualNode(fresh)) return;
  if (old.nodeType !== fresh.nodeType || old.nodeName !== fresh.nodeName) return old.replaceWith(fresh);
  if (old.nodeType !== Node.ELEMENT_NODE) return void (old.nodeValue = fresh.nodeValue);
  for (const { name } of [...old.attributes]) {
    if (!fresh.hasAttribute(name) && !(name === "open" && old.nodeName === "DETAILS")) old.removeAttribute(name);
  }
  for (const { name, value } of fresh.attributes) {
    if (old.getAttribute(name) !== value) old.setAttribute(name, value);
  }
  const byId = new Map([...old.children].filter((child) => child.id).map((child) => [child.id, child]));
  let at = old.firstChild;
  for (const child of [...fresh.childNodes]) {
    const twin = child.id ? byId.get(child.id) : at && !(at.id && byId.has(at.id)) ? at : null;
    if (!twin) {
      old.insertBefore(child, at);
    } else {
      if (twin === at) at = at.nextSibling;
      else (old.moveBefore ?? old.insertBefore).call(old, twin, at); // the newer one of both keeps the focus
      byId.delete(twin.id);
      update(twin, child);
    }
  }
  if (at) while (old.lastChild !== at) old.lastChild.remove();
  at?.remove();
}

function open() {
  if (stream || document.hidden) return;
  stream = new EventSource(address);
  stream.addEventListener("section", (event) => {
    const holder = document.createElement("template");
    holder.innerHTML = event.data;
    const fresh = holder.content.firstElementChild;
    update(document.getElementById(fresh.id), fresh);
  });
  stream.addEventListener("news", (event) => (document.getElementById("news").textContent = event.data));
  stream.addEventListener("ended", () => location.reload());
  stream.onopen = () => (offline.hidden = true);
  stream.onerror = () => {
    offline.hidden = false;
    if (stream.readyState === EventSource.CLOSED) setTimeout(() => location.reload(), 5000); // refused: the page says why
  };
}

function close() {
  stream?.close();
  stream = null;
}

addEventListener("visibilitychange", () => (document.hidden ? close() : open())); // browsers allow few streams a host
addEventListener("submit", close); // or the end of the session would be told before the page is left
open();
