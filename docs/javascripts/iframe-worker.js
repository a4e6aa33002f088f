// A browser starts no worker for a page that was opened from the file system. There, the search runs in a frame instead.
// What the two tell each other is copied, as between a page and a worker: the search changes what it is given.
if (location.protocol === "file:") {
  const message = (data) => new MessageEvent("message", { data: structuredClone(data) });

  window.Worker = class extends EventTarget {
    constructor(address) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      this.inside = frame.contentWindow;
      this.inside.postMessage = (data) => this.receive(message(data));
      this.loaded = new Promise((done) => {
        const script = this.inside.document.createElement("script");
        script.src = address;
        script.onload = done;
        this.inside.document.body.append(script);
      });
    }

    receive(event) {
      this.dispatchEvent(event);
      this.onmessage?.(event);
    }

    postMessage(data) {
      const event = message(data);
      this.loaded.then(() => this.inside.dispatchEvent(event));
    }

    terminate() {
      this.inside.frameElement.remove();
    }
  };
}
